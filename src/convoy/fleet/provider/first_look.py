"""Look once, before the engine is measured, whether a head answers in the coordinator's place.

It is apart from `provide`, because it ends a provider that has not begun. A connection that fails later is
tried again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import httpx
import msgspec

from convoy.config.clear_text import without_userinfo
from convoy.errors import ConfigError
from convoy.fleet.provider.provide import ProvideOptions

_log = logging.getLogger(__name__)

# Bounds the whole look, also if bytes come slowly.
_LOOK_S = 5.0
_MAX_HEALTH_BYTES = 4096
_OTHER_SERVERS = frozenset({"head", "proxy"})


async def check_coordinator(
    options: ProvideOptions, warn: Callable[[str], None], look_s: float = _LOOK_S
) -> None:
    """Raise `ConfigError` if a head or a proxy of Convoy answers at the coordinator's URL.

    A server that does not answer may be a coordinator later, and one in front of it may refuse for a while.
    So nothing else is an error here. ``warn`` gets a note on a server that does not say its kind.
    """
    health = await _health(options, look_s)
    if not {"status", "reason"} <= health.keys() or health.get("server") == "coordinator":
        return
    place = without_userinfo(options.url)
    # Only a head has the evidence level of its members.
    kind = "head" if "level" in health else health.get("server")
    if not isinstance(kind, str) or kind not in _OTHER_SERVERS:
        warn(f"the server at {place} does not say that it is a coordinator; it is dialled")
        return
    raise ConfigError(
        f"a {kind} of Convoy answers at {place}, expected a coordinator",
        hint="`convoy coordinator` prints its url: give it with ws:// in place of http://. "
        "--upstream is for the engine that answers, such as a head",
    )


async def _health(options: ProvideOptions, look_s: float) -> dict[str, object]:
    """Return what /health answers; nothing if that cannot be told."""
    url = options.url.rstrip("/").replace("ws", "http", 1)
    try:
        async with asyncio.timeout(look_s):
            health = msgspec.json.decode(await _beginning(f"{url}/health", options))
    except Exception as error:  # noqa: BLE001 - whatever a server sends, the provider dials on
        # Only the class is logged, because the text may hold the URL.
        _log.debug("the coordinator's /health cannot be told: %s", type(error).__name__)
        return {}
    return health if isinstance(health, dict) else {}


async def _beginning(url: str, options: ProvideOptions) -> bytes:
    """Return the first bytes of a body, as they are sent. The caller bounds the time."""
    verify = options.tls() if url.startswith("https:") else True
    found = b""
    async with (
        httpx.AsyncClient(verify=verify, trust_env=False, timeout=_LOOK_S) as client,
        client.stream("GET", url, headers={"accept-encoding": "identity"}) as answer,
    ):
        async for part in answer.aiter_raw():
            found += part
            if len(found) >= _MAX_HEALTH_BYTES:
                break
    return found[:_MAX_HEALTH_BYTES]
