"""When a step is late: from what steps of comparable size took on these stages, not from a constant.

Late is max(1 s, 5 times the 99th percentile of comparable steps). Comparable are steps with as much work
before their end, that of steps in flight ahead of them included, within a factor of two; a size that was
never seen is taken for a multiple of the next smaller one that was.
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
_KEPT = 200  # samples of each size
_FEW = 8  # so many say little alone
_SETTLING_STEPS = 4  # on stages that were just made: memory is touched for the first time
_SETTLING_FLOOR_S = 10.0
_SETTLING_FACTOR = 2.0  # fewer members may hold more layers each
_CONTEXT_TOKENS = 1024  # where attention is taken to cost as much as everything else


@dataclass(slots=True)
class _Sent:
    own: float
    work: float  # its own and that of the steps before it
    at_s: float
    patience: float = 1.0
    usual: bool = True


class StepClock:
    """Measures steps from their start to their return, in order. Read from any thread, told from one.

    ``unmeasured_s``: how long a step may take as long as nothing was measured.
    """

    def __init__(self, unmeasured_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._unmeasured_s = unmeasured_s
        self._now = now
        self._sent: deque[_Sent] = deque()
        self._sizes: dict[int, deque[float]] = {}
        self._settling = 0
        self._scale = 1.0

    def sent(self, step: Step) -> None:
        """A step is about to leave."""
        own = _work(step)
        ahead = sum(before.own for before in self._sent)
        self._sent.append(_Sent(own, own + ahead, self._now()))

    def returned(self) -> None:
        """The oldest step came back."""
        done = self._sent.popleft()
        if done.usual:
            samples = self._sizes.setdefault(_size(done.work), deque(maxlen=_KEPT))
            samples.append(self._now() - done.at_s)
        if self._settling:
            self._settling -= 1
            if not self._settling:
                self._scale = 1.0

    def allowed_s(self) -> float:
        """How long the oldest step in flight may take from its start."""
        sent = tuple(self._sent)
        if not sent:  # it came back while another thread was about to ask
            return self._unmeasured_s
        oldest = sent[0]
        usual_s = self._usual_s(_size(oldest.work))
        if usual_s is None:
            return self._unmeasured_s * oldest.patience
        floor_s = _SETTLING_FLOOR_S if self._settling else _FLOOR_S
        return max(floor_s, _FACTOR * self._scale * usual_s) * oldest.patience

    def due_s(self) -> float:
        """When the oldest step in flight is late, by the clock."""
        return self._sent[0].at_s + self.allowed_s()

    def extend(self, *, usual: bool = True) -> None:
        """Whoever looked found no fault: the oldest step gets as long again, and more.

        Where that is not ``usual``, the steps in flight now say nothing about those to come.
        """
        oldest = self._sent[0]
        for sent in self._sent:
            sent.usual = sent.usual and usual
        since = self._now() - oldest.at_s
        allowed_s = self.allowed_s()
        oldest.patience *= max(2.0, 2.0 * since / allowed_s)

    def settle(self) -> None:
        """Other stages run from now on, and steps in flight are forgotten."""
        self._sent.clear()
        self._settling = _SETTLING_STEPS
        self._scale = _SETTLING_FACTOR

    def _usual_s(self, size: int) -> float | None:
        sizes = dict(self._sizes)  # the thread that tells may add to it meanwhile
        seen = sizes.get(size, ())
        if len(seen) >= _FEW:
            return _percentile_99(seen)
        below = max((one for one in sizes if one < size), default=None)
        above = min((one for one in sizes if one > size), default=None)
        found = [_percentile_99(seen)] if seen else []
        if below is not None:
            found.append(_percentile_99(sizes[below]) * 2.0 ** (size - below))
        if not found and above is not None:
            found.append(_percentile_99(sizes[above]))
        return max(found, default=None)


def _work(step: Step) -> float:
    """In tokens at the start of a sequence: those further on attend to more."""
    return 1.0 + sum(
        row.num_tokens * (1.0 + (row.start + row.num_tokens) / _CONTEXT_TOKENS) for row in step.rows
    )


def _size(work: float) -> int:
    return int(math.log2(max(1.0, work)))


def _percentile_99(samples: deque[float] | tuple[float, ...]) -> float:
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, math.ceil(0.99 * len(ordered)) - 1)]
