"""Count wrong API keys, log them at a bounded rate, and answer the addresses that send them slowly."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator

from convoy.api.refusals import RateLimited, Unauthenticated, WrongKey
from convoy.cluster.metrics.families import Metric, counter
from convoy.errors import ConvoyError

_log = logging.getLogger(__name__)
_MAX_ADDRESSES = 4096
_FIRST_S, _LONGEST_S = 0.1, 2.0
_FORGET_S = 60.0
_LOG_EVERY_S = 10.0


class FailedKeys:
    """Count and delay wrong keys, on the event loop's thread. A right key never comes here and is never
    delayed.
    """

    def __init__(
        self,
        *,
        max_delayed: int = 64,
        max_delayed_of_address: int = 4,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Delay at most ``max_delayed`` answers at once. A further one is sent at once, as a rate limit."""
        self._max_delayed = max_delayed
        self._max_of_address = max_delayed_of_address
        self._clock = clock
        self._sleep = sleep
        self._failures: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._delayed: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._unlogged = 0
        self._logged_s = -_LOG_EVERY_S

    @property
    def num_addresses(self) -> int:
        """Return how many addresses are remembered. The number is bounded."""
        return len(self._failures)

    async def refuse(self, error: Unauthenticated, address: str) -> ConvoyError:
        """Return the error to answer with, after the delay for this number of failures of ``address``."""
        if not isinstance(error, WrongKey):
            self._counts["none"] += 1
            return error
        self._counts["wrong"] += 1
        address = _network(address)
        delay_s = self._note(address)
        self._report(address)
        if delay_s == 0:
            return error
        if self._delayed.total() >= self._max_delayed or self._delayed[address] >= self._max_of_address:
            return RateLimited(
                "too many requests with wrong api keys", retry_after_s=_LONGEST_S, hint="check the key"
            )
        self._delayed[address] += 1
        try:
            await self._sleep(delay_s)
        finally:
            self._delayed[address] -= 1
            if not self._delayed[address]:
                del self._delayed[address]
        return error

    def families(self) -> Iterator[Metric]:
        """Yield how many requests came without the right key."""
        values = [({"reason": reason}, self._counts[reason]) for reason in ("none", "wrong")]
        yield counter("convoy_http_failed_keys", "Requests without the right API key.", values)

    def _note(self, address: str) -> float:
        """Return the delay for one more failure of ``address``: none for its first in a minute."""
        now_s = self._clock()
        number, last_s = self._failures.pop(address, (0, now_s))
        number = 0 if now_s - last_s > _FORGET_S else number
        self._failures[address] = (number + 1, now_s)
        if len(self._failures) > _MAX_ADDRESSES:
            self._failures.popitem(last=False)
        # The first mistake costs nothing. After it the delay doubles with each one, up to the longest.
        return 0.0 if number == 0 else min(_LONGEST_S, _FIRST_S * 2.0 ** min(number - 1, 10))

    def _report(self, address: str) -> None:
        self._unlogged += 1
        if self._clock() - self._logged_s < _LOG_EVERY_S:
            return
        self._logged_s = self._clock()
        _log.warning("wrong api keys count=%d last_from=%s", self._unlogged, address)
        self._unlogged = 0


def _network(address: str) -> str:
    """Return the part of an address that counts as one client: all of IPv4, the first 64 bits of IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "?"
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.ip_network((found, 64), strict=False))
    return str(getattr(found, "ipv4_mapped", None) or found)
