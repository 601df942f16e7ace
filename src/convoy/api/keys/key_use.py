"""Limit and count the use of one API key: requests and tokens a minute, requests at once, tokens in all.

The classes run on the event loop's thread. A scrape reads their counts on another thread.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from convoy.api.refusals import NoBalance, RateLimited
from convoy.errors import RequestError

_MINUTE_S = 60
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """Hold a key's limits; None means no limit. ``total_tokens`` is a spend limit, the others are rates."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    total_tokens: int | None = None


NO_LIMITS = KeyLimits()


class LastMinute:
    """Keep a count over the last 60 seconds, by whole seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seconds: deque[list[int]] = deque()
        self._total = 0

    def add(self, number: int) -> None:
        """Count ``number`` now."""
        now = int(self._clock())
        if self._seconds and self._seconds[-1][0] == now:
            self._seconds[-1][1] += number
        else:
            self._seconds.append([now, number])
        self._total += number

    def total(self) -> int:
        """Return the count of the last 60 seconds."""
        now = int(self._clock())
        while self._seconds and self._seconds[0][0] <= now - _MINUTE_S:
            self._total -= self._seconds.popleft()[1]
        return self._total

    def wait_s(self, most: int) -> float:
        """Return the seconds until the total is at most ``most``."""
        left, now_s, until_s = self.total(), self._clock(), 0.0
        for second, number in self._seconds:
            if left <= most:
                break
            left -= number
            until_s = second + _MINUTE_S - now_s
        return max(1.0, until_s)


class KeyUse:
    """Track the use of one key. ``limits`` may be replaced while requests run."""

    def __init__(self, limits: KeyLimits, *, clock: Clock = time.monotonic) -> None:
        self.limits = limits
        self.requests = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.refusals: Counter[str] = Counter()
        self.running = 0
        self._held_tokens = 0
        self._minute_requests = LastMinute(clock)
        self._minute_tokens = LastMinute(clock)

    @property
    def total_tokens(self) -> int:
        """Return the settled tokens of prompts and answers."""
        return self.prompt_tokens + self.completion_tokens

    def begin(self) -> RequestUse:
        """Count a request and return its `RequestUse`. Raises `RateLimited` or `NoBalance`."""
        limits = self.limits
        if limits.total_tokens is not None and self.total_tokens >= limits.total_tokens:
            raise self._spent(f"all of the {limits.total_tokens} tokens of this key are used")
        if limits.concurrent_requests is not None and self.running >= limits.concurrent_requests:
            raise self._limited(
                "concurrent_requests",
                f"{self.running} requests of this key run, and it may have {limits.concurrent_requests}",
                1.0,
            )
        if limits.requests_per_minute is not None:
            self._check_minute("requests", self._minute_requests, limits.requests_per_minute, 1)
        if limits.tokens_per_minute is not None:
            self._check_minute("tokens", self._minute_tokens, limits.tokens_per_minute, 1)
        self._minute_requests.add(1)
        self.requests += 1
        return RequestUse(self)

    def take(self, prompt_tokens: int, most_tokens: int) -> None:
        """Hold ``most_tokens`` for a request and count its prompt in this minute. Raises as `begin`."""
        limits = self.limits
        if limits.tokens_per_minute is not None:
            if prompt_tokens > limits.tokens_per_minute:
                self.refusals["tokens_per_minute"] += 1
                raise RequestError(
                    f"the prompt has {prompt_tokens} tokens, and this key may use {limits.tokens_per_minute} "
                    "in a minute",
                    code="rate_limit_exceeded",
                    hint="shorten the prompt",
                )
            self._check_minute("tokens", self._minute_tokens, limits.tokens_per_minute, prompt_tokens)
        if limits.total_tokens is not None:
            left = max(0, limits.total_tokens - self.total_tokens - self._held_tokens)
            if most_tokens > left:
                raise self._spent(
                    f"the request may use {most_tokens} tokens, and {left} of {limits.total_tokens} are left"
                )
        # Hold the worst case now, so that requests that run at once cannot overspend together.
        self._held_tokens += most_tokens
        self._minute_tokens.add(prompt_tokens)

    def settle(self, held: int, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Replace the ``held`` tokens of a request by the tokens that it used."""
        self._held_tokens -= held
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        self.completion_tokens += completion_tokens
        self._minute_tokens.add(completion_tokens)

    def _check_minute(self, what: str, minute: LastMinute, limit: int, more: int) -> None:
        used = minute.total()
        if used + more > limit:
            raise self._limited(
                f"{what}_per_minute",
                f"this key has used {used} {what} in the last minute, and it may use {limit}",
                minute.wait_s(limit - more),
            )

    def _limited(self, limit: str, text: str, wait_s: float) -> RateLimited:
        self.refusals[limit] += 1
        return RateLimited(text, retry_after_s=wait_s, hint=f"send it again in {wait_s:.0f} s")

    def _spent(self, text: str) -> NoBalance:
        self.refusals["total_tokens"] += 1
        return NoBalance(text, hint="ask for fewer tokens (max_tokens), or for another key")


class RequestUse:
    """Track one request's use of its key, from its admission to its end."""

    def __init__(self, use: KeyUse) -> None:
        self._use = use
        self._held = 0
        self._settled = (0, 0, 0)

    def hold(self, prompt_tokens: int, most_tokens: int) -> None:
        """Hold tokens before the request runs. Raises `RateLimited`, `NoBalance` or `RequestError`."""
        self._use.take(prompt_tokens, most_tokens)
        self._held = most_tokens

    def used(self, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> None:
        """Note what the request used; it is settled when the request ends."""
        self._settled = (prompt_tokens, cached_tokens, completion_tokens)

    def __enter__(self) -> Self:
        self._use.running += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._use.running -= 1
        self._use.settle(self._held, *self._settled)
