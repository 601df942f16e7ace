"""Send the page's static files.

It is apart from the sessions because files need no key, and hold nothing of a cluster or a fleet.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from convoy.api.page.rights import STATIC_PREFIX, PageRights
from convoy.api.refusals import UnknownPath

STATIC = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'; object-src 'none'"
SAFE_HEADERS = {
    "content-security-policy": _POLICY,
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class PageFiles:
    """Answer with the page and its files, which are read once."""

    def __init__(self, rights: PageRights) -> None:
        self._rights = rights
        self._files = {
            path.relative_to(STATIC).as_posix(): (path.read_bytes(), _TYPES[path.suffix])
            for path in STATIC.rglob("*")
            if path.suffix in _TYPES
        }

    async def root(self, request: Request) -> Response:
        """Answer with the page. HEAD is answered without it too: clients ask so whether a server is there."""
        if request.method == "HEAD":
            return Response(headers=SAFE_HEADERS)
        return self._file("index.html")

    async def static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if self._rights.why_not is not None:
            raise UnknownPath(self._rights.why_not, hint="docs/page.md says how to reach the page")
        if name not in self._files:
            raise UnknownPath(f"nothing is served at {STATIC_PREFIX}{ascii(name[:80])[1:-1]}")
        data, kind = self._files[name]
        return Response(data, media_type=kind, headers=SAFE_HEADERS)
