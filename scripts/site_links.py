"""Adapt links for the documentation site; a hook of mkdocs.yml.

Pages of the repository link to files beside docs/, which no site holds. The hook adds the root's pages to
the site, and replaces a link to any other file by its text and path. Links between pages are left to mkdocs,
which refuses broken ones.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Repository path -> path in the site. Pages of docs/ keep their place.
ROOT_PAGES = {
    "ARCHITECTURE.md": "ARCHITECTURE.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "SECURITY.md": "SECURITY.md",
    "bench/METHODOLOGY.md": "bench/METHODOLOGY.md",
    "training/README.md": "training/bundled-models.md",
}
HOME = {"README.md": "index.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>[^\[\]]*)\]\((?P<target>[^()\s:#]+)(?P<anchor>#[^()\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the root's pages to the files of the site."""
    from mkdocs.structure.files import File

    for source, place in ROOT_PAGES.items():
        text = adapt((ROOT / source).read_text(encoding="utf-8"), source)
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page of docs/ with adapted links."""
    source = page.file.src_uri
    return markdown if source in ROOT_PAGES.values() else adapt(markdown, f"docs/{source}")


def adapt(markdown: str, source: str) -> str:
    """Return ``markdown``, the page at ``source`` in the repository, with links that hold in the site."""
    fences = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    here = posixpath.dirname(site_path(source) or source)

    def replace(link: re.Match[str]) -> str:
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(source), link["target"]))
        place = site_path(wanted)
        if place is not None:
            return f"[{link['text']}]({posixpath.relpath(place, here or '.')}{link['anchor'] or ''})"
        if (ROOT / wanted).exists():
            return f"`{wanted}`" if link["text"] == wanted else f"{link['text']} (`{wanted}`)"
        return link[0]

    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in fences)


def site_path(source: str) -> str | None:
    """Return where the site holds the repository's file ``source``, or None."""
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return {**ROOT_PAGES, **HOME}.get(source)
