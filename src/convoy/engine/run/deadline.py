"""The deadline of a step, from the times of comparable steps on these stages rather than from a constant.

A step is late after max(1 s, 5 times the 99th percentile of comparable steps). Steps are comparable if the
work before their end is the same within a factor of two; that includes the work of steps in flight ahead of
them. A size that was seen seldom counts as a multiple of the
next smaller size, or as the next larger one where none is smaller.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from convoy.wire.messages.control import Step

_FLOOR_S = 1.0
_FACTOR = 5.0
# Samples of each size.
_KEPT = 200
# Fewer samples than these are not trusted alone.
_FEW = 8
# Steps on new stages that are slow, because they touch memory for the first time.
_SETTLING_STEPS = 4
_SETTLING_FLOOR_S = 10.0
# After a loss, fewer members may hold more layers each.
_SETTLING_FACTOR = 2.0
# At this context length, attention is assumed to cost as much as everything else.
_CONTEXT_TOKENS = 1024


@dataclass(slots=True)
class _Sent:
    own: float
    # Its own and that of the steps before it.
    work: float
    at_s: float
    extension: float = 1.0
    usual: bool = True


class StepClock:
    """Measure steps from their start to their return, in order. Any thread may read; one thread records.

    Before the first measurement, a step may take ``unmeasured_s`` seconds. ``seen`` holds the seconds of
    earlier steps, by size; this clock adds its own.
    """

    def __init__(
        self,
        unmeasured_s: float,
        now: Callable[[], float] = time.monotonic,
        *,
        seen: dict[int, deque[float]] | None = None,
    ) -> None:
        self._unmeasured_s = unmeasured_s
        self._now = now
        self._sent: deque[_Sent] = deque()
        self._sizes: dict[int, deque[float]] = {} if seen is None else seen
        self._settling = 0
        self._scale = 1.0

    def sent(self, step: Step) -> None:
        """Record a step that is about to leave."""
        own = _work(step)
        ahead = sum(before.own for before in self._sent)
        self._sent.append(_Sent(own, own + ahead, self._now()))

    def returned(self) -> None:
        """Record that the oldest step came back."""
        done = self._sent.popleft()
        if done.usual:
            samples = self._sizes.setdefault(_size(done.work), deque(maxlen=_KEPT))
            samples.append(self._now() - done.at_s)
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._scale = 1.0

    def allowed_s(self) -> float:
        """Return how many seconds the oldest step in flight may take from its start."""
        sent = tuple(self._sent)
        # The step came back while another thread was about to ask.
        if not sent:
            return self._unmeasured_s
        oldest = sent[0]
        usual_s = self._usual_s(_size(oldest.work))
        if usual_s is None:
            return self._unmeasured_s * oldest.extension
        floor_s = _SETTLING_FLOOR_S if self._settling else _FLOOR_S
        return max(floor_s, _FACTOR * self._scale * usual_s) * oldest.extension

    def due_s(self) -> float:
        """Return the time, by the clock, at which the oldest step in flight is late."""
        return self._sent[0].at_s + self.allowed_s()

    def extend(self, *, usual: bool = True) -> None:
        """Give the oldest step at least as long again, because a check found no fault.

        If that is not ``usual``, the times of the steps in flight do not count for later steps.
        """
        oldest = self._sent[0]
        for sent in self._sent:
            sent.usual = sent.usual and usual
        since = self._now() - oldest.at_s
        allowed_s = self.allowed_s()
        oldest.extension *= max(2.0, 2.0 * since / allowed_s)

    def forget(self) -> None:
        """Drop all times: those of the warm-up have the capture of each size, which comes once."""
        self._sizes.clear()

    def settle(self) -> None:
        """Forget the steps in flight, because other stages run from now on."""
        self._sent.clear()
        self._settling = _SETTLING_STEPS
        self._scale = _SETTLING_FACTOR

    def _usual_s(self, size: int) -> float | None:
        # A copy, because the recording thread may add to it meanwhile.
        sizes = dict(self._sizes)
        seen = sizes.get(size, ())
        if len(seen) >= _FEW:
            return _percentile_99(seen)
        below = max((one for one in sizes if one < size), default=None)
        above = min((one for one in sizes if one > size), default=None)
        found = [_percentile_99(seen)] if seen else []
        if below is not None:
            # A size is a power of two of work: each size above doubles the time.
            found.append(_percentile_99(sizes[below]) * 2.0 ** (size - below))
        if not found and above is not None:
            found.append(_percentile_99(sizes[above]))
        return max(found, default=None)


def _work(step: Step) -> float:
    """Return the work in units of one token at the start of a sequence: later tokens attend to more keys."""
    return 1.0 + sum(
        row.num_tokens * (1.0 + (row.start + row.num_tokens) / _CONTEXT_TOKENS) for row in step.rows
    )


def _size(work: float) -> int:
    return int(math.log2(max(1.0, work)))


def _percentile_99(samples: deque[float] | tuple[float, ...]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
