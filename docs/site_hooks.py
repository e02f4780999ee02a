"""Pages of the site that are files of the project's root: README, ARCHITECTURE and their kin.

Used by mkdocs.yml. They keep one text for the repository and for the site: links into docs/ lose
the folder, links to one another become links to their pages, and links to code become its name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
SHIM = "https://unpkg.com/iframe-worker/shim"
OWN_SHIM = "assets/search_from_disk.js"
"""How the offline plugin searches pages that are opened from the disk, and how we do."""

LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in PAGES.items():
        text = as_page((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links of a page in docs/ that leave the folder."""
    return markdown if page.file.src_uri in PAGES.values() else LINK.sub(_from_docs, markdown)


def on_post_page(output: str, **_: Any) -> str:
    """Nothing of a page comes from elsewhere; all pages lie in one folder."""
    return output.replace(SHIM, OWN_SHIM)


def on_post_template(output_content: str, **_: Any) -> str:
    """The same for the page of what is not found."""
    return output_content.replace(SHIM, OWN_SHIM)


def as_page(text: str) -> str:
    """The text of a file of the root, as a page beside those of docs/."""
    return LINK.sub(_from_root, text)


def _from_root(found: re.Match[str]) -> str:
    mark, words, target = found.groups()
    path, hash_, anchor = target.partition("#")
    if "://" in target or not path:
        return found[0]
    if path in PAGES:
        return f"{mark}[{words}]({PAGES[path]}{hash_}{anchor})"
    if path.startswith("docs/"):
        return f"{mark}[{words}]({path.removeprefix('docs/')}{hash_}{anchor})"
    return f"`{words.strip('`')}`"


def _from_docs(found: re.Match[str]) -> str:
    mark, words, target = found.groups()
    if not target.startswith("../"):
        return found[0]
    path, hash_, anchor = target.removeprefix("../").partition("#")
    if path in PAGES:
        return f"{mark}[{words}]({PAGES[path]}{hash_}{anchor})"
    return f"`{words.strip('`')}`"
