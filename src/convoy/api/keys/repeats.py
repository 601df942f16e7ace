"""Refuse identical requests that fail with a context error again and again, without doing the work again."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convoy.api.refusals import RepeatedRequest
from convoy.errors import RequestError

CONTEXT_ERROR = "context_length_exceeded"
_MAX_FAILURES = 5
_WITHIN_S = 60.0
_MAX_REQUESTS = 4096


class Repeats:
    """Track the requests that failed lately, by an HMAC that means nothing outside this process.

    Use it on the event loop's thread. ``max_requests`` bounds the table; the oldest entry goes first.
    """

    def __init__(
        self, *, max_requests: int = _MAX_REQUESTS, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_requests = max_requests
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._failures: OrderedDict[bytes, deque[float]] = OrderedDict()

    @property
    def num_requests(self) -> int:
        """Return how many failed requests are remembered."""
        return len(self._failures)

    def check(self, caller: str, kind: str, body: bytes) -> bytes:
        """Return the request's mark for `failed`. Raises `RepeatedRequest` after 5 failures in a minute."""
        mark = hmac.new(self._secret, f"{caller}\0{kind}\0".encode(), hashlib.sha256)
        mark.update(body)
        found = mark.digest()
        failures = self._failures.get(found)
        if failures is not None and len(failures) == _MAX_FAILURES:
            wait_s = failures[0] + _WITHIN_S - self._clock()
            if wait_s > 0:
                self._failures.move_to_end(found)
                raise RepeatedRequest(
                    f"this request failed {_MAX_FAILURES} times in a minute: it does not fit the context",
                    retry_after_s=max(1.0, wait_s),
                    hint="shorten it: it fails again unchanged",
                )
        return found

    @contextmanager
    def noting(self, mark: bytes) -> Iterator[None]:
        """Record a context error of the request with ``mark`` inside this block."""
        try:
            yield
        except RequestError as error:
            if error.code == CONTEXT_ERROR:
                self.failed(mark)
            raise

    def failed(self, mark: bytes) -> None:
        """Record a context error of the request with ``mark``."""
        failures = self._failures.setdefault(mark, deque(maxlen=_MAX_FAILURES))
        failures.append(self._clock())
        self._failures.move_to_end(mark)
        if len(self._failures) > self._max_requests:
            self._failures.popitem(last=False)
