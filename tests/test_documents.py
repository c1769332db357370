"""Every relative link of every page leads somewhere, also to a heading; every page of docs/ can be reached from the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for folder in (ROOT, ROOT / "docs", ROOT / "examples") for page in sorted(folder.glob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)


def links(page: Path) -> list[str]:
    """Targets of a page's links, code blocks left out, the web left out."""
    return [target for target in LINK.findall(FENCE.sub("", page.read_text())) if not target.startswith(("http:", "https:"))]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.relative_to(ROOT)}: no heading {link}"


def test_every_page_can_be_reached_from_the_readme():
    found, new = set(), [ROOT / "README.md"]
    while new:
        page = new.pop()
        found.add(page)
        targets = {(page.parent / link.partition("#")[0]).resolve() for link in links(page)}
        new += [target for target in targets - found if target.suffix == ".md" and target.exists()]
    assert set((ROOT / "docs").glob("*.md")) <= found


NAMED_TEST = re.compile(r"`((?:\w+/)*test_\w+\.py|test_\w+?_?(?:\.\.)?)`")


@pytest.mark.parametrize("page", ["faults.md", "support.md"])
def test_tests_that_a_page_names_exist(page):
    """A table names files of tests/ and, behind each, functions in it; `test_a_..` names all that begin so."""
    found = 0
    for number, line in enumerate((ROOT / "docs" / page).read_text().splitlines(), 1):
        where, source = "no file before it", ""
        for name in NAMED_TEST.findall(line) if line.startswith("|") else []:
            if name.endswith(".py"):
                where, source = name, (ROOT / "tests" / name).read_text()
            else:
                pattern = rf"^def {name.removesuffix('..')}{'' if name.endswith('..') else chr(92) + 'b'}"
                assert re.search(pattern, source, re.M), f"docs/{page}:{number}: {name} in {where}"
            found += 1
    assert found > 20
