"""The size of the next slice, from the time of the last one: a slice delays every other step.

It is apart from `blocks` because it knows neither blocks nor executors: its tests need only a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FIRST_BYTES = 1024 * 1024
_LEAST_BYTES = 64 * 1024
_LONG_S = 0.5


class SliceSize:
    """Adapt ``num_bytes``, the size of the next slice, so that one takes up to half a second.

    It stays between 64 KiB and ``max_bytes``.
    """

    def __init__(self, max_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        self.num_bytes = min(_FIRST_BYTES, max_bytes)
        self._max_bytes = max_bytes
        self._now = now

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Time the transfer of one slice, inside a `with`."""
        began_s = self._now()
        yield
        took_s = self._now() - began_s
        if took_s > _LONG_S:
            self.num_bytes = max(_LEAST_BYTES, self.num_bytes // 2)
        elif took_s < _LONG_S / 2:
            self.num_bytes = min(self._max_bytes, 2 * self.num_bytes)
