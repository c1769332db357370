"""The documentation site builds without a warning (broken links and anchors are warnings), and its pages read as they were meant."""

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.docs_pictures import FOLDER, PICTURES, command

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs", reason="pip install -e '.[docs]' brings it")
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},  # advertises another program
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stdout + done.stderr
    return folder


def test_every_page_is_there(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"overview", "CONTRIBUTING"}
    assert pages <= {path.stem for path in site.glob("*.html")}


def test_local_links_and_pictures_are_there(site):
    for page in site.glob("*.html"):
        body = page.read_text()
        for link in re.findall(r'(?:href|src)="([^"#:]+)(?:#[^"]*)?"', body[body.index("<article") : body.index("</article>")]):
            assert (page.parent / html.unescape(link)).exists(), f"{page.name}: {link}"


def test_lists_and_tables_are_not_swallowed_by_a_paragraph(site):
    """GitHub starts a list or a table without an empty line before it, the site does not."""
    for page in site.glob("*.html"):
        for paragraph in re.findall(r"<p>(.*?)</p>", page.read_text(), re.S):
            assert not re.search(r"^\s*(\* |- |\d+\. |\|)", paragraph, re.M), f"{page.name}: {paragraph[:200]}"


def test_pictures_are_those_that_the_tool_draws(tmp_path):
    assert {path.stem for path in FOLDER.glob("*.png")} == set(PICTURES)
    pages = "".join(path.read_text() for path in (ROOT / "docs").glob("*.md"))
    assert all(f"images/{name}.png" in pages for name in PICTURES)
    done = subprocess.run(command("mask", tmp_path), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    size = slice(16, 24)  # width and height in a PNG's header
    assert (tmp_path / "mask.png").read_bytes()[size] == (FOLDER / "mask.png").read_bytes()[size]
