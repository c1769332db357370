"""Block diffusion language models on Megatron: block parallelism for long contexts.

This folder is a portion of the `megatron` namespace package; `megatron.core` and
`megatron.training` come from the package `megatron-core`.
"""

__version__ = "0.1.0"
