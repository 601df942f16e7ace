"""The rule for addresses without TLS: keys, tokens and work cross no network in clear text."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from convoy.errors import ConfigError


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach ``host``.

    A name other than localhost counts as reachable by others.
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def crosses_in_clear(url: str) -> bool:
    """Return whether what is sent to ``url`` crosses a network without TLS."""
    parts = urlsplit(url)
    return parts.scheme not in {"https", "wss"} and not is_loopback(parts.hostname or "")


def without_userinfo(url: str) -> str:
    """Return ``url`` for a message: without a user or password, also if it is no valid URL."""
    before, found, place = url.rpartition("@")
    if not found:
        return url[:200]
    # A password may hold any character, so the last @ counts.
    scheme, mark, _ = before.partition("://")
    return f"{scheme if mark else ''}{mark}{place}"[:200]


def check_sealed(url: str, doing: str) -> None:
    """Check that ``url`` has TLS or is on this machine; ``doing`` is what the caller is about to do.

    Raises `ConfigError`.
    """
    if crosses_in_clear(url):
        parts = urlsplit(url)
        place = without_userinfo(parts.netloc)
        raise ConfigError(
            f"refusing to {doing} {(parts.hostname or without_userinfo(url))[:200]} without TLS",
            hint=f"{parts.scheme or 'http'}s://{place}, or a tunnel whose end is at 127.0.0.1",
        )
