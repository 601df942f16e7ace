"""By which host:port a provider may have dialled this coordinator: its registration is signed for that."""

from __future__ import annotations

from urllib.parse import urlsplit

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def authorities_of(
    stated: tuple[str, ...], names: tuple[str, ...], host: str, *, tls: bool
) -> tuple[str, ...]:
    """What a registration may be signed for: what was ``stated``, else what the provider's ``host`` header
    says where its name is one of ``names``, which are ours.

    The header alone proves nothing: whoever stands in between chooses it. A name may begin with "*.", for one
    label. Without a port the scheme's own is meant.
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
