"""Scripts of this repository under stand-ins for the commands that they start, and what their flags mean to the engine and to us."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

from megatron.bdlm.platform import cpu

cpu.enable()

from megatron.training.arguments import parse_args  # noqa: E402

from megatron.bdlm.training import arguments  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

PYTHON = f'exec "{sys.executable}" "$@"'
TORCHRUN = """printf '%s\\n' "$@" >"$STAND_IN_LOG/node${NODE_RANK:-0}\""""


def run_script(script: Path, folder: Path, commands: dict[str, str], *flags: str, **environment: object) -> subprocess.CompletedProcess:
    """Run a script with `flags`, and `commands`, bash texts by name, before everything else on PATH.

    Variables of the caller's own environment that our scripts read are left out; `folder` receives what stand-ins log.
    """
    stand_ins = folder / "bin"
    stand_ins.mkdir(exist_ok=True)
    for name, text in {"python": PYTHON, **commands}.items():
        (stand_ins / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (stand_ins / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH")}
    given = {name: str(value) for name, value in environment.items()}
    return subprocess.run(
        ["bash", script, *flags], capture_output=True, text=True, stdin=subprocess.DEVNULL, cwd=folder,
        env={**kept, "STAND_IN_LOG": str(folder), "BDLM_PYTHON": str(stand_ins / "python"), **given, "PATH": f"{stand_ins}:{kept['PATH']}"},
    )


def flag_value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]


def parsed(flags: list[str], entry: str, world: int, monkeypatch, group: type | None = None) -> Namespace:
    """What the engine's parser makes of a torchrun command line; rules that are checked before the engine's own have passed."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setattr(sys, "argv", flags[flags.index(entry) :])
    args = parse_args(lambda parser: arguments.add_bdlm_arguments(parser, group))
    arguments._check_before_engine(args)
    return args
