"""Packaging: our portion of the `megatron` namespace; the metadata live in pyproject.toml."""

from setuptools import find_namespace_packages, setup

setup(packages=find_namespace_packages(include=["megatron.bdlm", "megatron.bdlm.*"]))
