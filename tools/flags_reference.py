"""Write docs/flags.md, the reference of the `bdlm` flags, from the dataclass that defines them.

    python tools/flags_reference.py            # writes docs/flags.md
    python tools/flags_reference.py --check    # exit code 1 if the file is out of date
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import sys
import typing
from pathlib import Path

from megatron.bdlm.config import RECIPES, BDLMConfig

TARGET = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def field_docstrings() -> dict[str, str]:
    """Docstring below each field of `BDLMConfig`."""
    body = ast.parse(inspect.getsource(BDLMConfig)).body[0].body
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def flag_of(field: dataclasses.Field) -> str:
    """The flag of a field, as the engine's argument factory names it."""
    hyphens = field.name.replace("_", "-")
    return f"--no-{hyphens}" if field.type is bool and field.default is True else f"--{hyphens}"


def values_of(field: dataclasses.Field) -> str:
    """Legal values for the table."""
    if field.type is bool:
        return "switch, `--no-...`" if field.metadata else "switch"
    kinds = [kind for kind in typing.get_args(field.type) if kind is not type(None)]
    if typing.get_origin(field.type) is typing.Literal:
        return ", ".join(f"`{value}`" for value in kinds)
    return getattr(kinds[0] if kinds else field.type, "__name__", str(field.type))


def reference() -> str:
    """The Markdown page."""
    help_texts = field_docstrings()
    lines = [
        "# Flags",
        "",
        "Every stock Megatron flag is taken; these are ours. The page is generated: `python tools/flags_reference.py`.",
        "",
        "| flag | values | default | meaning |",
        "|---|---|---|---|",
    ]
    for field in dataclasses.fields(BDLMConfig):
        meaning = help_texts[field.name].replace("|", "\\|")
        lines.append(f"| `{flag_of(field)}` | {values_of(field)} | `{field.default}` | {meaning} |")
    lines += ["", "## Recipes", "", "`--bdlm-recipe NAME` sets the values of a published recipe; a flag given beside it wins.", ""]
    lines += ["| recipe | values |", "|---|---|"]
    for name, values in RECIPES.items():
        shown = " ".join(f"`--{key.replace('_', '-')}{'' if value is True else f' {value}'}`" for key, value in values.items())
        lines.append(f"| `{name}` | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        current = TARGET.read_text() if TARGET.is_file() else ""
        if current != reference():
            print(f"{TARGET} is out of date: run python tools/flags_reference.py", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main())
