"""Describe a coordinator to its page: the providers and the work, whole or as one account may see it."""

from __future__ import annotations

from itertools import islice

import msgspec

from convoy.fleet.books.keys import Grant
from convoy.fleet.coordinator.coordinator import ConnectedProvider, Coordinator
from convoy.fleet.coordinator.providers.record import GoneProvider, RefusedProviders

# The most providers and models in a status: a page of more is not readable, and would hold answers up.
MAX_LISTED = 500


class OfferedModel(msgspec.Struct, frozen=True):
    """Describe a model that is served or has a price, as ``/v1/models`` does too."""

    id: str
    providers: int
    # Providers by the level that they proved.
    levels: dict[str, int]
    waiting: int
    max_context: int
    # None for a consumer: it would tell what others ask.
    free_slots: int | None


class FleetRecord(msgspec.Struct, frozen=True):
    """Hold what only sessions see: the providers, the keys that wait, and the counts of all requests."""

    coordinator_key: str
    num_providers: int
    # The first of them, by name.
    providers: list[ConnectedProvider]
    # Those that left and are not back.
    gone: list[GoneProvider]
    # Keys that wait for approval, in hex.
    unapproved: list[str]
    refusals: list[RefusedProviders]
    # Providers that left without draining.
    num_lost: int
    # Requests that are over, by how they ended.
    outcomes: dict[str, int]
    # Further tries of requests that a provider failed.
    retries: int
    # Requests that their client sealed to the provider, so that this coordinator could not read them.
    sealed: int


class FleetStatus(msgspec.Struct, frozen=True):
    """Describe a coordinator at this moment. A consumer sees its own work, and no ``record``."""

    ready: bool
    reason: str
    running: int
    waiting: int
    # Tokens of answers, as providers report them, and tokens of prompts that were settled.
    generated_tokens: int
    prompt_tokens: int
    offered: list[OfferedModel]
    record: FleetRecord | None = None


def whole_status(coordinator: Coordinator) -> FleetStatus:
    """Return the status for administrators. Call it on the event loop's thread, as `key_status`."""
    counts, record = coordinator.counts, coordinator.record
    return _status(
        coordinator,
        None,
        generated_tokens=counts.generated_tokens,
        prompt_tokens=counts.prompt_tokens(),
        record=FleetRecord(
            coordinator.proof.public_key.hex(),
            coordinator.num_connected,
            coordinator.providers(MAX_LISTED),
            record.gone(),
            coordinator.approvals.waiting(),
            record.refusals(),
            record.num_lost,
            counts.outcomes(),
            counts.retries,
            counts.sealed,
        ),
    )


def key_status(coordinator: Coordinator, grant: Grant) -> FleetStatus:
    """Return the status for a consumer: its account's requests, and its key's tokens."""
    use = coordinator.key_uses.of(grant)
    return _status(
        coordinator,
        grant.account,
        generated_tokens=use.completion_tokens,
        prompt_tokens=use.prompt_tokens,
        record=None,
    )


def _status(
    coordinator: Coordinator,
    account: str | None,
    *,
    generated_tokens: int,
    prompt_tokens: int,
    record: FleetRecord | None,
) -> FleetStatus:
    running, waiting = coordinator.load(account)
    models = islice(coordinator.models(), MAX_LISTED)
    draining = coordinator.lifecycle.draining
    number = coordinator.num_connected
    reason = "the coordinator is shutting down" if draining else f"{number} provider{'s' * (number != 1)}"
    return FleetStatus(
        ready=not draining and number > 0,
        reason=reason if number or draining else "no provider is connected",
        running=running,
        waiting=waiting,
        generated_tokens=generated_tokens,
        prompt_tokens=prompt_tokens,
        offered=[_offered(coordinator, name, is_whole=record is not None) for name in models],
        record=record,
    )


def _offered(coordinator: Coordinator, name: str, *, is_whole: bool) -> OfferedModel:
    return OfferedModel(
        name,
        coordinator.num_providers(name),
        coordinator.levels(name),
        coordinator.waiting(name),
        coordinator.max_context(name),
        coordinator.free_slots(name) if is_whole else None,
    )
