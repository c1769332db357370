"""Write docs/flags.md, the reference of this project's flags, from the dataclasses that define them.

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.bdlm.platform import cpu  # noqa: E402

cpu.enable()  # before the engine is imported

from megatron.bdlm.config import RECIPES, BDLMConfig  # noqa: E402
from megatron.bdlm.data.sft import FinetuneOptions  # noqa: E402
from megatron.bdlm.drafter.options import DrafterOptions  # noqa: E402
from megatron.bdlm.training.arguments import DryRunOptions  # noqa: E402

GROUPS = {
    BDLMConfig: "",
    FinetuneOptions: "## Fine-tuning\n\n`finetune_bdlm.py` only.",
    DryRunOptions: "## Before a run\n\nBoth entry scripts; see [operations](operations.md#before-the-run).",
    DrafterOptions: "## Drafters\n\n`pretrain_dflash.py` only, which takes none of the others; see [drafters](drafters.md).",
}
"""Dataclasses whose fields are flags, and what stands above each table."""

TARGET = Path(__file__).resolve().parents[1] / "docs" / "flags.md"


def field_docstrings(group: type) -> dict[str, str]:
    """Docstring below each field of a dataclass."""
    body = ast.parse(inspect.getsource(group)).body[0].body
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


def table(group: type) -> list[str]:
    """Lines of the table of a dataclass's flags."""
    help_texts = field_docstrings(group)
    lines = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    for field in dataclasses.fields(group):
        meaning = help_texts[field.name].replace("|", "\\|")
        lines.append(f"| `{flag_of(field)}` | {values_of(field)} | `{field.default}` | {meaning} |")
    return lines


def reference() -> str:
    """The Markdown page."""
    lines = [
        "# Flags",
        "",
        "Every stock Megatron flag is taken; these are ours. The page is generated: `python tools/flags_reference.py`.",
    ]
    for group, heading in GROUPS.items():
        lines += ["", heading] if heading else []
        lines += ["", *table(group)]
    lines += ["", "## Recipes", "", "`--bdlm-recipe NAME` sets the values of a published recipe; a flag given beside it wins.", ""]
    lines += ["| recipe | values |", "|---|---|"]
    for name, values in RECIPES.items():
        shown = " ".join(f"`--{key.replace('_', '-')}{'' if value is True else f' {value}'}`" for key, value in values.items())
        lines.append(f"| `{name}` | {shown} |")
    lines += ["", "## What this page does not list", "", "Megatron's own flags (`python pretrain_bdlm.py --help`), and those of the tools (`--help` of each)."]
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
