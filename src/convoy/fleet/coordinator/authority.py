"""Decide for which host:port a provider may sign its registration at this coordinator."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def authorities_of(
    stated: tuple[str, ...], names: tuple[str, ...], host: str, *, tls: bool
) -> tuple[str, ...]:
    """Return the addresses for which a registration may be signed.

    These are the ``stated`` ones. Without them, it is the provider's ``host`` header, if its name is one of
    ``names``, the coordinator's own. The header alone proves nothing, because a man in the middle chooses it.
    A name may begin with "*." for one label. A header without a port means the scheme's own port.
    """
    if stated:
        return stated
    try:
        parts = urlsplit(f"//{host}")
        port = parts.port or (443 if tls else 80)
    except ValueError:
        return ()
    name = (parts.hostname or "").lower()
    if not any(_is_named(name, ours.lower()) for ours in names):
        return ()
    return (f"[{name}]:{port}" if ":" in name else f"{name}:{port}",)


def _is_named(name: str, ours: str) -> bool:
    if ours.startswith("*."):
        return name.partition(".")[2] == ours[2:] != ""
    return name == ours != ""
