"""The page's files: small, unchanged libraries, no address of another host, and nothing inline."""

from __future__ import annotations

import hashlib
import re
import tomllib

from convoy.api.page.files import STATIC

_MAX_BYTES = 260_000
_VENDOR = STATIC / "vendor"


def test_libraries_are_those_of_their_packages_and_have_licences() -> None:
    libraries = tomllib.loads((_VENDOR / "libraries.toml").read_text())["library"]
    assert {one["file"] for one in libraries} == {
        path.name for path in _VENDOR.iterdir() if path.suffix in {".js", ".css"}
    }
    for one in libraries:
        assert hashlib.sha256((_VENDOR / one["file"]).read_bytes()).hexdigest() == one["sha256"], one["file"]
    licences = (_VENDOR / "LICENSES.txt").read_text()
    for name in ("preact", "htm", "uPlot", "marked", "DOMPurify"):
        assert name in licences, name


def test_all_files_together_are_small() -> None:
    files = [path for path in STATIC.rglob("*") if path.suffix in {".html", ".js", ".css", ".svg"}]
    assert len(files) > 10
    assert sum(path.stat().st_size for path in files) < _MAX_BYTES


def test_own_files_load_nothing_from_elsewhere_and_have_nothing_inline() -> None:
    for path in STATIC.iterdir():
        if path.suffix in {".js", ".css"}:
            text = path.read_text()
            assert not re.search(r"(?:src|href|import|from|url)\s*[=(]?\s*[\"']https?:", text), path.name
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|\bstyle=|https?:", page)


def test_model_text_becomes_html_in_one_place_that_cleans_it() -> None:
    users = [path.name for path in STATIC.glob("*.js") if "marked" in path.read_text()]
    assert users == ["markdown.js"]
    own = {path.name: path.read_text() for path in STATIC.glob("*.js")}
    inner = {name for name, text in own.items() if "dangerouslySetInnerHTML" in text or "innerHTML" in text}
    assert inner == {"chat.js", "markdown.js"}
    assert own["chat.js"].count("__html:") == own["chat.js"].count("__html: toHtml(") == 1
