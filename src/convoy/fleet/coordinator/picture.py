"""Take the picture of a fleet: the providers and the work, whole or as one account may see it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cached_property

import msgspec

from convoy.fleet.books.keys import Grant
from convoy.fleet.capacity import ModelState
from convoy.fleet.coordinator.coordinator import Coordinator
from convoy.fleet.status import FleetRecord, FleetStatus, OfferedModel

# The most providers and models in a status, and the most models of all its providers together: a page of more
# is not readable, and would hold answers up.
_MAX_LISTED = 500
_MAX_OFFERS = 1000
# A page that is sent the status twice a second sees a loss within a second all the same.
_MAX_AGE_S = 0.25


class FleetPicture:
    """Give every reader the fleet's state, computed once for all of them. It is at most ``max_age_s`` old.

    Lives on the event loop's thread.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        max_age_s: float = _MAX_AGE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator = coordinator
        self._max_age_s, self._clock = max_age_s, clock
        self._moment = _Moment(coordinator)
        self._began_s = -math.inf

    def models(self) -> list[ModelState]:
        """Return the models that are served or have a price, by name."""
        return self._now().models

    def whole(self) -> FleetStatus:
        """Return the status for sessions."""
        return self._now().whole

    def of_key(self, grant: Grant) -> FleetStatus:
        """Return the status for a consumer: its account's requests, and its key's tokens."""
        assert grant.account is not None, "only a consumer's key has a status"
        use = self._coordinator.key_uses.of(grant)
        waiting = self._coordinator.waiting_of(grant.account)
        return _status(
            self._coordinator,
            _with_waiting(self._now().offered, waiting),
            (self._coordinator.running_of(grant.account), sum(waiting.values())),
            generated_tokens=use.completion_tokens,
            prompt_tokens=use.prompt_tokens,
        )

    def _now(self) -> _Moment:
        now_s = self._clock()
        if now_s - self._began_s >= self._max_age_s:
            self._moment, self._began_s = _Moment(self._coordinator), now_s
        return self._moment


class _Moment:
    """Hold the state of a coordinator, each part as it is first asked for."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    @cached_property
    def models(self) -> list[ModelState]:
        return [self._coordinator.model_state(name) for name in self._coordinator.models()]

    @cached_property
    def offered(self) -> list[OfferedModel]:
        """Return the models as consumers see them, without any account's requests."""
        return [_offered(one, 0, None) for one in self.models[:_MAX_LISTED]]

    @cached_property
    def whole(self) -> FleetStatus:
        coordinator = self._coordinator
        counts, record = coordinator.counts, coordinator.record
        return _status(
            coordinator,
            [_offered(one, one.waiting, one.free_slots) for one in self.models[:_MAX_LISTED]],
            coordinator.load(),
            generated_tokens=counts.generated_tokens,
            prompt_tokens=counts.prompt_tokens(),
            record=FleetRecord(
                coordinator.proof.public_key.hex(),
                coordinator.num_connected,
                coordinator.providers(_MAX_LISTED, _MAX_OFFERS),
                record.gone(),
                coordinator.approvals.waiting(),
                record.refusals(),
                record.num_lost,
                record.num_removed,
                counts.outcomes(),
                counts.retries,
                counts.sealed,
            ),
        )


def _status(
    coordinator: Coordinator,
    offered: list[OfferedModel],
    load: tuple[int, int],
    *,
    generated_tokens: int,
    prompt_tokens: int,
    record: FleetRecord | None = None,
) -> FleetStatus:
    draining, number = coordinator.lifecycle.draining, coordinator.num_connected
    reason = "the coordinator is shutting down" if draining else f"{number} provider{'s' * (number != 1)}"
    return FleetStatus(
        ready=not draining and number > 0,
        reason=reason if number or draining else "no provider is connected",
        running=load[0],
        waiting=load[1],
        generated_tokens=generated_tokens,
        prompt_tokens=prompt_tokens,
        offered=offered,
        record=record,
    )


def _with_waiting(offered: list[OfferedModel], waiting: dict[str, int]) -> list[OfferedModel]:
    if not waiting:
        return offered
    return [
        msgspec.structs.replace(one, waiting=waiting[one.id]) if one.id in waiting else one for one in offered
    ]


def _offered(model: ModelState, waiting: int, free_slots: int | None) -> OfferedModel:
    return OfferedModel(model.name, model.providers, model.levels, waiting, model.max_context, free_slots)
