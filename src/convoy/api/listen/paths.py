"""Normalise request paths: a base URL that ends in a slash makes ``//v1/models`` or ``/v1/models/``."""

from __future__ import annotations

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile(r"//+")


def plain_path(path: str) -> str:
    """Return ``path`` without doubled slashes and without one at its end."""
    return _SLASHES.sub("/", path).rstrip("/") or "/"


def at_plain_path(app: ASGIApp) -> ASGIApp:
    """Pass only plain paths to ``app``, so that routes, keys and counts agree about the path."""

    async def plain(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "path": plain_path(scope["path"])}, receive, send)

    return plain
