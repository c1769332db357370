"""The house rules: who may import whom, what stays free of torch.distributed and Megatron, no cycles."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megatron" / "bdlm"

LEVEL = {
    "config": 0, "platform": 0, "testing": 9,
    "parallel": 1, "planner": 2, "attention": 2,
    "data": 3, "objective": 4, "checkpoint": 3, "model": 5, "generation": 6,
    "training": 7, "drafter": 8,
}
"""A folder may import from folders of a lower level, and from itself."""

PURE = ["parallel/plan.py", "parallel/blocks.py", "parallel/intervals.py", "parallel/layout.py", "parallel/placement.py",
        "parallel/program.py", "parallel/relations.py", "parallel/staircase.py", "parallel/batches.py", "parallel/anchor_plan.py",
        "data/noise.py", "data/schedules.py",
        *(f"planner/{path.name}" for path in sorted((PACKAGE / "planner").glob("*.py")))]
"""Files that import neither torch.distributed nor Megatron."""


def _imports(path: Path) -> set[str]:
    """Modules that a file imports, functions included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _folder(module: str) -> str | None:
    parts = module.split(".")
    return parts[2] if parts[:2] == ["megatron", "bdlm"] and len(parts) > 2 else None


def test_every_folder_has_a_level():
    folders = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _files()} - {"__init__"}
    assert folders == set(LEVEL)


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    above = {
        module for module in _imports(path)
        if (folder := _folder(module)) is not None and folder != own and LEVEL.get(folder, -1) >= LEVEL[own]
    }
    assert not above, f"{path.relative_to(ROOT)} imports upwards: {sorted(above)}"


@pytest.mark.parametrize("name", PURE)
def test_pure_files_know_neither_distributed_nor_the_engine(name):
    modules = _imports(PACKAGE / name)
    assert not {m for m in modules if m.startswith("torch.distributed")}
    assert not {m for m in modules if m.startswith(("megatron.core", "megatron.training"))}


def test_the_oracle_uses_none_of_the_code_under_test():
    assert not {m for m in _imports(PACKAGE / "testing" / "oracle.py") if m.startswith("megatron")}


def test_the_package_imports_no_script():
    scripts = {"pretrain_bdlm", "finetune_bdlm", "tools", "benchmarks", "examples"}
    for path in _files():
        assert not {m for m in _imports(path) if m.split(".")[0] in scripts}, path


def test_modules_form_no_cycle():
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in _files()}
    edges = {name: {m for m in _imports(path) if m in names and m != name} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        if name not in done:
            for other in edges[name]:
                visit(other, (*above, name))
            done.add(name)

    for name in names:
        visit(name, ())


def test_megatron_is_a_namespace_folder():
    assert not (ROOT / "megatron" / "__init__.py").exists()
