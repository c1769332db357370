"""Hooks of mkdocs (`mkdocs.yml` names this file): the site holds what its pages link to outside docs/.

Pages are written for the repository, where README.md and CONTRIBUTING.md lie beside docs/, and link pictures, results
and scripts by relative paths. Each such file becomes a part of the site, and links are rewritten to where it lies there:

    docs/concepts.md        concepts.md
    README.md               overview.md  (index.md is docs/index.md)
    benchmarks/results/x    benchmarks/results/x
"""

import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\[[^\]]*\])\(([^)\s]+)\)")  # [text] and target; a picture in a link: its own
FENCE = re.compile(r"(^```.*?^```$)", re.M | re.S)
ALWAYS = ("README.md", "CONTRIBUTING.md")

_repository_path: dict[str, str] = {}  # page on the site -> file in the repository


def site_path(repository_path: str) -> str:
    """Where a file of the repository lies on the site."""
    if repository_path == "README.md":
        return "overview.md"
    return repository_path.removeprefix("docs/")


def local_links(page: str) -> list[str]:
    """Files of the repository that a page links to."""
    text = FENCE.sub("", (ROOT / page).read_text())
    found = [_target(page, link) for _, link in LINK.findall(text)]
    return [target for target in dict.fromkeys(found) if target is not None]


def rewritten(text: str, page: str) -> str:
    """The page's text with links as the site has them, those to folders as their text; code blocks are left alone."""
    here = posixpath.dirname(site_path(page))

    def link(match: re.Match) -> str:
        target, _, anchor = match[2].partition("#")
        path = _target(page, match[2]) if target else None
        if path is None:
            return match[0] if not _is_folder(page, target) else match[1][1:-1]
        place = posixpath.relpath(site_path(path), here or ".")
        return f"{match[1]}({place}{'#' + anchor if anchor else ''})"

    parts = FENCE.split(text)
    return "".join(part if FENCE.fullmatch(part) else LINK.sub(link, part) for part in parts)


def _target(page: str, link: str) -> str | None:
    """The file of the repository behind a link, or None for the web, an anchor, or nothing that exists."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
    return target if (ROOT / target).is_file() else None


def _is_folder(page: str, target: str) -> bool:
    return bool(target) and ":" not in target and (ROOT / posixpath.dirname(page) / target).is_dir()


# ---- the hooks ---------------------------------------------------------------------------------------


def on_files(files, config):
    """Add every file outside docs/ that a page of the site links to, directly or through another."""
    _repository_path.clear()
    _repository_path.update({page.src_uri: f"docs/{page.src_uri}" for page in files.documentation_pages()})
    waiting = [*_repository_path.values(), *ALWAYS]
    seen = set(waiting)
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
            _repository_path[site_path(path)] = path
        if path.endswith(".md"):
            new = [target for target in local_links(path) if target not in seen]
            seen.update(new)
            waiting += [target for target in new if not target.startswith("docs/")]
    return files


def on_page_markdown(markdown, page, config, files):
    return rewritten(markdown, _repository_path[page.file.src_uri])
