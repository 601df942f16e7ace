"""Decide on admission, queues and retries, as one decision without sockets or clocks.

A request is sent on if a provider has a free slot, and waits otherwise. It is refused for lack of room only
if its queue is full, or if so many requests wait that its deadline would pass first. A request that a
provider fails before the first token goes to another provider, before all waiting requests of its account.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from convoy.config.table import QUEUE_PER_ACCOUNT, QUEUE_WAIT_S, QUEUE_WAITING
from convoy.errors import NotReady, QueueFull
from convoy.fleet.capacity import Capacity, Load, ModelState, Places
from convoy.fleet.coordinator.routing.queue import FairQueue
from convoy.fleet.coordinator.routing.route_request import Owner, RouteRequest
from convoy.trust.evidence.level import Level

if TYPE_CHECKING:
    from convoy.fleet.coordinator.routing.policy import RoutingPolicy
    from convoy.fleet.coordinator.routing.providers import ProviderTable

# How long a provider that failed gets no requests, doubled with each failure.
_FIRST_SHUT_S, _MOST_SHUT_S = 0.25, 30.0
_MAX_FAILURES = 64
# The weight of the newest answer's length.
_MEMORY = 0.05
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 3600.0


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limit each model's queue."""

    max_waiting: int = QUEUE_WAITING
    max_per_account: int = QUEUE_PER_ACCOUNT
    max_wait_s: float = QUEUE_WAIT_S


@dataclass(frozen=True, slots=True)
class Assignment:
    """Assign ``ask`` to ``provider``."""

    ask: RouteRequest
    provider: str


class _Model:
    """Hold a model's providers, policy and queue, and the mean length of its answers."""

    def __init__(self, limits: QueueLimits, policy: RoutingPolicy | None) -> None:
        # Both need numpy, which takes 10 MB. A coordinator starts without any model.
        from convoy.fleet.coordinator.routing.policy import FirstToFinish
        from convoy.fleet.coordinator.routing.providers import ProviderTable

        self.providers = ProviderTable()
        self.policy = policy or FirstToFinish()
        self.queue = FairQueue(limits.max_waiting, limits.max_per_account)
        self.mean_output = 0.0
        self.mean_prompt = 0.0

    def output_tokens(self, ask: RouteRequest) -> float:
        """Return the number of tokens that the answer is expected to have."""
        return min(ask.max_tokens, self.mean_output) if self.mean_output else float(ask.max_tokens)

    def learn(self, ask: RouteRequest, output_tokens: int) -> None:
        first = not self.mean_output
        self.mean_output += (1.0 if first else _MEMORY) * (max(1, output_tokens) - self.mean_output)
        self.mean_prompt += (1.0 if first else _MEMORY) * (ask.prompt_tokens - self.mean_prompt)

    def wait_s(self, ask: RouteRequest, ahead: int) -> float:
        """Return the time until the request's turn behind ``ahead`` others; infinite without a provider."""
        prompt = self.mean_prompt or ask.prompt_tokens
        rate = self.providers.served_per_s(prompt, self.mean_output or ask.max_tokens)
        return (ahead + 1) / rate if rate else math.inf


class Dispatcher:
    """Place requests with providers. Not thread-safe: one loop owns it, and tells it the time."""

    def __init__(self, limits: QueueLimits | None = None, policy: RoutingPolicy | None = None) -> None:
        self._limits = limits or QueueLimits()
        self._policy = policy
        self._models: dict[str, _Model] = {}
        self._running: dict[int, Assignment] = {}
        # Running requests that have their first token.
        self._read: set[int] = set()
        # Failures in a row, by provider.
        self._failures: dict[str, int] = {}

    # Providers.

    def join(
        self,
        provider: str,
        offers: dict[str, Capacity],
        level: Level,
        now_s: float,
        *,
        owner: Owner | None = None,
    ) -> list[Assignment]:
        """Add a provider that is ready, and return the waiting requests that go there at once."""
        for capacity in offers.values():
            capacity.check()
        self._failures.pop(provider, None)
        for model, capacity in offers.items():
            self._model(model).providers.add(provider, capacity, level, owner)
        return [one for model in offers for one in self._place_waiting(model, now_s)]

    def leave(self, provider: str) -> list[RouteRequest]:
        """Remove a provider, and return the requests that ran there, with or without their first token."""
        for model in self._models.values():
            # `tick` forgets the models that have neither a provider nor a request afterwards.
            model.providers.remove(provider)
        self._failures.pop(provider, None)
        lost = [one.ask for one in self._running.values() if one.provider == provider]
        for ask in lost:
            self._end(ask)
        return lost

    def drain(self, provider: str) -> None:
        """Send a provider no new requests. It ends those that it runs."""
        for model in self._models.values():
            if provider in model.providers:
                model.providers.set_open(provider, False)

    def set_level(self, provider: str, level: Level, now_s: float) -> list[Assignment]:
        """Note the level of a provider's newest evidence, and return the requests that may go on now."""
        found = []
        for name, model in self._models.items():
            if provider in model.providers:
                model.providers.set_level(provider, level)
                found += self._place_waiting(name, now_s)
        return found

    def note_load(self, provider: str, loads: dict[str, Load], now_s: float) -> list[Assignment]:
        """Note a heartbeat, and return the waiting requests that may go on now.

        Models without an offer are ignored.
        """
        found = []
        for model, load in loads.items():
            load.check()
            if model in self._models and provider in self._models[model].providers:
                self._models[model].providers.note_load(provider, load)
                found += self._place_waiting(model, now_s)
        return found

    # Requests.

    def submit(self, ask: RouteRequest, now_s: float) -> Assignment | None:
        """Return the assignment of ``ask``, or None if it waits.

        Raises `QueueFull` with an estimate of when there is room. Raises `NotReady` if there are providers
        that take new requests, but none of them could ever take this one.
        """
        model = self._model(ask.model)
        # No waiting request could be placed, so this one takes no other's turn.
        if (assignment := self._place(model, ask, now_s)) is not None:
            return assignment
        if model.providers.num_open() and not model.providers.could_ever(ask):
            raise NotReady(
                f"none of {model.providers.num_open()} providers of {ask.model} may take this request: level "
                f"{ask.level.text}, {ask.prompt_tokens} tokens",
                public="no provider may take this request: see its level and the length of its prompt",
            )
        self._refuse_too_many(model, ask, now_s)
        model.queue.add(ask)
        return None

    def first_token(self, number: int) -> None:
        """Note that the provider has read the prompt."""
        if (one := self._running.get(number)) is not None and number not in self._read:
            self._read.add(number)
            self._models[one.ask.model].providers.has_read(one.provider, one.ask)

    def finished(
        self, number: int, now_s: float, *, first_s: float, output_tokens: int, decode_s: float
    ) -> list[Assignment]:
        """Note a complete answer, and return the requests that may go on instead.

        ``first_s`` are the seconds to its first token, and ``decode_s`` those from there on.
        """
        one = self._running.get(number)
        if one is None:
            return []
        model = self._models[one.ask.model]
        self._failures.pop(one.provider, None)
        if one.provider in model.providers:
            running = model.providers.running(one.provider)
            model.providers.learn(
                *(one.provider, one.ask),
                first_s=first_s,
                output_tokens=output_tokens,
                decode_s=decode_s,
                running=running,
            )
        model.learn(one.ask, output_tokens)
        self._end(one.ask)
        return self._place_waiting(one.ask.model, now_s)

    def failed(self, number: int, now_s: float) -> tuple[RouteRequest | None, list[Assignment]]:
        """Note that the provider refused the request, failed or fell silent.

        Returns the request as it may be passed to `again`, and the requests that may go on.
        """
        one = self._running.get(number)
        if one is None:
            return None, []
        self._end(one.ask)
        count = min(_MAX_FAILURES, self._failures.get(one.provider, 0) + 1)
        self._failures[one.provider] = count
        # A provider that keeps failing gets requests ever more rarely.
        shut_s = min(_MOST_SHUT_S, _FIRST_SHUT_S * 2.0 ** (count - 1))
        self._models[one.ask.model].providers.close_until(one.provider, now_s + shut_s, shut_s)
        ask = replace(one.ask, excluded=one.ask.excluded | {one.provider})
        return ask, self._place_waiting(one.ask.model, now_s)

    def again(self, ask: RouteRequest, now_s: float) -> Assignment | None:
        """Submit a failed request once more. It has its place in the queue, however full that is."""
        model = self._model(ask.model)
        ask = _not_hopeless(model, ask)
        if (assignment := self._place(model, ask, now_s)) is not None:
            return assignment
        model.queue.add(ask, first=True)
        return None

    def abandon(self, number: int, now_s: float) -> list[Assignment]:
        """Remove a request that has no reader any more, from the queue or from its provider."""
        for model in self._models.values():
            if model.queue.remove(number) is not None:
                return []
        one = self._running.get(number)
        if one is None:
            return []
        self._end(one.ask)
        return self._place_waiting(one.ask.model, now_s)

    def tick(self, now_s: float) -> tuple[list[RouteRequest], list[Assignment]]:
        """Return the requests past their deadline, and the assignments that time has made possible.

        A provider that failed may be tried again after a while.
        """
        expired = [ask for model in self._models.values() for ask in model.queue.expired(now_s)]
        placed = [one for name in list(self._models) for one in self._place_waiting(name, now_s)]
        self._forget_models()
        return expired, placed

    def _forget_models(self) -> None:
        """Forget the models without providers and requests. Their names are whatever providers offered."""
        idle = {
            name for name, model in self._models.items() if not (len(model.providers) or len(model.queue))
        }
        if idle:
            for name in idle - {one.ask.model for one in self._running.values()}:
                del self._models[name]

    def next_tick_s(self, now_s: float) -> float | None:
        """Return the time at which `tick` has something to do, or None."""
        times = []
        for model in self._models.values():
            if len(model.queue):
                times += [model.queue.next_deadline_s(), model.providers.reopens_s(now_s)]
        return min((time for time in times if time is not None), default=None)

    def waiting(self, model: str) -> int:
        """Return how many requests wait for the model."""
        return len(self._models[model].queue) if model in self._models else 0

    def state(self, name: str) -> ModelState:
        """Return the state of a model: nothing for one without a provider and a request."""
        model = self._models.get(name)
        return ModelState(name) if model is None else model.providers.state(name, len(model.queue))

    def load(self) -> tuple[int, int]:
        """Return how many requests are with a provider and how many wait."""
        return len(self._running), sum(len(model.queue) for model in self._models.values())

    def running_of(self, account: str) -> int:
        """Return how many requests of an account are with a provider."""
        return sum(one.ask.account == account for one in self._running.values())

    def waiting_of(self, account: str) -> dict[str, int]:
        """Return how many requests of an account wait, by model, for the models where any does."""
        models = self._models.items()
        return {name: count for name, model in models if (count := model.queue.waiting(account))}

    def running(self, provider: str, offers: Iterable[str]) -> dict[str, int]:
        """Return how many requests run at a provider, by model, for the models of its ``offers``."""
        return {name: self._models[name].providers.running(provider) for name in offers}

    def places(self, provider: str, offers: Iterable[str]) -> dict[str, Places]:
        """Return a provider's room, by model, for the models of its ``offers``."""
        return {name: self._models[name].providers.places(provider) for name in offers}

    def wait_s(self, ask: RouteRequest) -> float:
        """Return how long ``ask`` would wait if it were queued now.

        Returns at most an hour, also if the time is unknown.
        """
        model = self._model(ask.model)
        return _retry_s(model.wait_s(ask, model.queue.ahead_of(ask.account)))

    def providers(self, model: str) -> ProviderTable | None:
        """Return a model's providers, for pictures and metrics."""
        return self._models[model].providers if model in self._models else None

    def models(self) -> list[str]:
        """Return the models that some connected provider serves."""
        return sorted(name for name, model in self._models.items() if len(model.providers))

    def _model(self, name: str) -> _Model:
        if (model := self._models.get(name)) is None:
            model = self._models[name] = _Model(self._limits, self._policy)
        return model

    def _refuse_too_many(self, model: _Model, ask: RouteRequest, now_s: float) -> None:
        queue = model.queue
        wait_s = model.wait_s(ask, queue.ahead_of(ask.account))
        own = queue.waiting(ask.account)
        if own >= queue.max_per_account:
            most = queue.max_per_account
            why = f"{own} requests of this account wait for {ask.model}, and at most {most} may"
        elif queue.is_full(ask.account):
            # An account is told of its own requests alone.
            why = f"the queue for {ask.model} is full: at most {queue.max_waiting} requests may wait"
        elif model.mean_output and model.providers.num_open() and now_s + wait_s > ask.deadline_s:
            # Before a first answer, sizes are guesses from bytes,
            # and far too inaccurate to refuse a request for them.
            why = (
                f"it would be this request's turn in about {wait_s:.0f} s, and it may wait "
                f"{ask.deadline_s - now_s:.0f} s"
            )
        else:
            return
        one_s = model.wait_s(ask, 0)
        late_s = max(wait_s - (ask.deadline_s - now_s), one_s)
        raise QueueFull(why, public=why, retry_after_s=_retry_s(late_s))

    def _place(self, model: _Model, ask: RouteRequest, now_s: float) -> Assignment | None:
        provider = model.policy.choose(model.providers, ask, model.output_tokens(ask), now_s)
        if provider is None:
            return None
        model.providers.begin(provider, ask)
        model.queue.started(ask)
        self._running[ask.number] = assignment = Assignment(ask, provider)
        return assignment

    def _place_waiting(self, name: str, now_s: float) -> list[Assignment]:
        model, placed = self._model(name), []

        def place(ask: RouteRequest) -> bool:
            assignment = self._place(model, _not_hopeless(model, ask), now_s)
            if assignment is not None:
                placed.append(assignment)
            return assignment is not None

        while len(model.queue) and model.providers.free_slots() and model.queue.take(place) is not None:
            pass
        return placed

    def _end(self, ask: RouteRequest) -> None:
        one = self._running.pop(ask.number)
        model = self._models[ask.model]
        if ask.number not in self._read:
            model.providers.has_read(one.provider, ask)
        self._read.discard(ask.number)
        model.providers.end(one.provider)
        model.queue.ended(ask)


def _not_hopeless(model: _Model, ask: RouteRequest) -> RouteRequest:
    """Return ``ask`` without its excluded providers if no other provider could take it.

    A provider that failed a request is passed over only while another one may take it.
    """
    if ask.excluded and model.providers.num_open() and not model.providers.could_ever(ask):
        return replace(ask, excluded=frozenset())
    return ask


def _retry_s(wait_s: float) -> float:
    return min(_MAX_RETRY_S, max(_MIN_RETRY_S, wait_s)) if math.isfinite(wait_s) else _MAX_RETRY_S
