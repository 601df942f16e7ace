"""Authenticate a coordinator's callers: the key of a request, and the use that the key may make."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass

from starlette.datastructures import Headers

from convoy.api.keys.key_use import NO_LIMITS, KeyUse, RequestUse
from convoy.api.keys.keys import key_of
from convoy.fleet.books.directory import Directory
from convoy.fleet.books.keys import Grant, Scope

_MAX_KEYS = 10_000


class KeyUses:
    """Count the rates of keys, at this coordinator alone, on the event loop's thread.

    ``max_keys`` bounds the table. The key that has been idle for longest is forgotten, unless it has
    requests.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._uses: OrderedDict[bytes, KeyUse] = OrderedDict()

    @property
    def num_keys(self) -> int:
        """Return how many keys are in the table."""
        return len(self._uses)

    def of(self, grant: Grant) -> KeyUse:
        """Return the use of a key, with the limits that it has now."""
        use = self._uses.pop(grant.key_hash, None) or KeyUse(NO_LIMITS)
        self._uses[grant.key_hash] = use
        use.limits = grant.terms.limits
        if len(self._uses) > self._max_keys:
            idle = next((key for key, one in self._uses.items() if not one.running), None)
            if idle is not None:
                del self._uses[idle]
        return use


@dataclass(frozen=True, slots=True)
class Consumer:
    """Hold the account and the key of a request for an answer. ``at_end`` ends the ``use`` of the key."""

    account: str
    grant: Grant
    use: RequestUse
    at_end: ExitStack


async def caller_of(directory: Directory, headers: Headers, scope: Scope) -> Grant:
    """Return what the key of a request grants. Raises `Unauthenticated` or `Forbidden`."""
    return await asyncio.to_thread(directory.grant, key_of(headers), scope)
