"""Simulate a provider: it reads one prompt after the other, and decodes for all others at once.

Times of a token follow `Capacity.token_s`. A provider that is slower than it claims has a ``factor``.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from convoy.fleet.capacity import Capacity, Load
from convoy.fleet.coordinator.routing.route_request import RouteRequest


@dataclass(slots=True)
class SimulatedWork:
    """Hold one request at a simulated provider."""

    ask: RouteRequest
    output_tokens: int
    began_s: float
    # The time of its first token; 0 before that.
    first_s: float = 0.0
    # Tokens still to come.
    left: float = 0.0


@dataclass(slots=True)
class SimulatedProvider:
    """Simulate one provider in an event loop: after each change, `next_s` is the time of its next event."""

    name: str
    capacity: Capacity
    # Its true seconds over those of the capacity that it claims.
    factor: float = 1.0
    refuses: bool = False
    reading: deque[SimulatedWork] = field(default_factory=deque)
    reads_until_s: float = 0.0
    decoding: dict[int, SimulatedWork] = field(default_factory=dict)
    # The time up to which decodes are counted.
    at_s: float = 0.0
    version: int = 0

    def start(self, work: SimulatedWork, now_s: float) -> None:
        """Accept a request."""
        self._advance(now_s)
        self.reading.append(work)
        if len(self.reading) == 1:
            self.reads_until_s = now_s + self._read_s(work)

    def step(self, now_s: float) -> tuple[list[SimulatedWork], list[SimulatedWork]]:
        """Return the requests that gave their first token by now, and those that are finished."""
        self._advance(now_s)
        begun = []
        while self.reading and self.reads_until_s <= now_s:
            work = self.reading.popleft()
            work.first_s, work.left = self.reads_until_s, float(work.output_tokens - 1)
            self.decoding[work.ask.number] = work
            begun.append(work)
            if self.reading:
                self.reads_until_s = max(now_s, self.reads_until_s) + self._read_s(self.reading[0])
        # Decodes advance in fractions of a token, so a finished one may be short of zero by rounding.
        over = [work for work in self.decoding.values() if work.left <= 1e-9]
        for work in over:
            del self.decoding[work.ask.number]
        return begun, over

    def next_s(self) -> float | None:
        """Return the time at which `step` has something to do, or None."""
        times = [self.reads_until_s] if self.reading else []
        if self.decoding:
            times.append(self.at_s + self._token_s() * min(work.left for work in self.decoding.values()))
        return min(times, default=None)

    def load(self) -> Load:
        """Return the load that a heartbeat reports."""
        running = len(self.reading) + len(self.decoding)
        queued = sum(work.ask.prompt_tokens for work in self.reading)
        return Load(max(0, self.capacity.slots - running), queued, 0, 0.0)

    def _advance(self, now_s: float) -> None:
        if self.decoding:
            tokens = (now_s - self.at_s) / self._token_s()
            for work in self.decoding.values():
                work.left -= tokens
        self.at_s = now_s

    def _token_s(self) -> float:
        return self.capacity.token_s(len(self.decoding)) * self.factor

    def _read_s(self, work: SimulatedWork) -> float:
        return work.ask.prompt_tokens / self.capacity.prefill_rate * self.factor
