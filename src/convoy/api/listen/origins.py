"""Check Host and Origin headers, so that a web page cannot reach the model through its reader's browser."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from convoy.api.listen.options import ServeOptions, check_origin
from convoy.api.refusals import Forbidden
from convoy.config.clear_text import is_loopback

_Answer = list[tuple[bytes, bytes]]
_EXPOSED = b"x-request-id, retry-after"
_TAKEN = b"authorization, x-api-key, content-type, idempotency-key, convoy-resumable, last-event-id"
_PREFLIGHT_S = b"600"


class Origins:
    """Apply the host and origin rules of one listener."""

    def __init__(self, options: ServeOptions) -> None:
        self._loopback = is_loopback(options.host)
        self._hosts = {host.lower().strip("[]") for host in (options.host, *options.allowed_hosts)}
        self._hosts |= set() if self._loopback else _own_names()
        self._origins = {check_origin(origin) for origin in options.allowed_origins}

    def check_host(self, headers: Headers) -> None:
        """Raise `Forbidden` for a name that is not this server's.

        A foreign name that resolves to this machine is how a web page reaches a server near its reader (DNS
        rebinding). That attack needs a name, so off loopback every IP literal is answered.
        """
        host = headers.get("host")
        if host is None:
            return
        name = (_netloc(host)[0] or "").lower()
        known = is_loopback(name) or name in self._hosts or f"*.{name.partition('.')[2]}" in self._hosts
        if known or (not self._loopback and _is_address(name)):
            return
        raise Forbidden(
            f"this server does not answer to the host {name[:80]!r}",
            hint="call it by its address; `convoy serve --allowed-host` and `convoy coordinator --authority` "
            "allow a name",
        )

    def check_origin(self, headers: Headers) -> _Answer:
        """Return the headers that let a page read its answer. Raises `Forbidden` for another site's page."""
        origin = headers.get("origin")
        if origin is None:
            if headers.get("sec-fetch-site", "none") not in {"none", "same-origin"}:
                raise Forbidden("cross-site requests of a browser are refused")
            return []
        if origin in self._origins:
            allowed = (b"access-control-allow-origin", origin.encode())
            return [allowed, (b"vary", b"origin"), (b"access-control-expose-headers", _EXPOSED)]
        if _netloc(headers.get("host", "")) != _netloc(origin.partition("://")[2]) or origin == "null":
            raise Forbidden(
                f"cross-site requests of a browser are refused, and this one is from {origin[:80]!r}",
                hint="`convoy serve --allowed-origin` permits one",
            )
        return []


def preflight(headers: Headers, permitted: _Answer) -> _Answer | None:
    """Return the headers of the answer to a permitted page's preflight, None for anything else."""
    if not permitted or "access-control-request-method" not in headers:
        return None
    answer = [
        *permitted,
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", _TAKEN),
        (b"access-control-max-age", _PREFLIGHT_S),
    ]
    if headers.get("access-control-request-private-network") == "true":
        answer.append((b"access-control-allow-private-network", b"true"))
    return answer


def _own_names() -> set[str]:
    """Return the names of this machine that no other site can have."""
    name = socket.gethostname().lower()
    return {name, f"{name}.local"} if name else set()


def _netloc(host: str) -> tuple[str | None, int | None]:
    """Return name and port of a Host header, without the ports that schemes imply."""
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port
    except ValueError:
        return None, None
    return parts.hostname, None if port in {80, 443} else port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
