"""Look once, before the engine is measured, whether a head answers in the coordinator's place.

It is apart from `provide`, because it ends a provider that has not begun. A connection that fails later is
tried again.
"""

from __future__ import annotations

import httpx
import msgspec

from convoy.errors import ConfigError, ConvoyError
from convoy.fleet.provider.provide import ProvideOptions

_LOOK_S = 5.0
_MAX_HEALTH_BYTES = 4096


async def check_coordinator(options: ProvideOptions) -> None:
    """Raise `ConfigError` if a server of Convoy answers at the URL that is no coordinator.

    A server that does not answer may be a coordinator later, and one in front of it may refuse for a while.
    So nothing else is an error here.
    """
    url = options.url.rstrip("/").replace("ws", "http", 1)
    try:
        verify = options.tls() if url.startswith("https:") else True
        async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=_LOOK_S) as client:
            answer = await client.get(f"{url}/health")
        health = msgspec.json.decode(answer.content[:_MAX_HEALTH_BYTES])
    except (httpx.HTTPError, msgspec.DecodeError, ConvoyError):
        return
    if not isinstance(health, dict) or not {"status", "reason"} <= health.keys():
        return
    if health.get("server") != "coordinator":
        # Only a head has the evidence level of its members.
        kind = "head" if "level" in health else "server"
        raise ConfigError(
            f"a {kind} of Convoy answers at {options.url}, expected a coordinator",
            hint="`convoy coordinator` prints its url: give it with ws:// in place of http://. "
            "--upstream is for the engine that answers, such as a head",
        )
