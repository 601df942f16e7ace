"""Describe a coordinator at a moment: what GET /status answers, and what its page and `convoy top` read.

It is apart from `coordinator`, so that a client needs neither a database nor a server's packages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from convoy.fleet.capacity import Places

# A provider that left has drained first, and one that was lost has not. An administrator revoked the removed.
Departure = Literal["left", "lost", "removed"]


@dataclass(frozen=True, slots=True)
class ConnectedProvider:
    """Describe a connected provider, as it is listed."""

    name: str
    identity: str
    software: str
    level: str
    # Why the level is not a higher one.
    why: str
    # The level of each member that sent evidence.
    members: dict[str, str]
    # The members of its roster that sent no evidence.
    absent: tuple[str, ...]
    # Running requests, by model.
    models: dict[str, int]
    draining: bool
    # Tokens that the provider offers to add to a prompt, by model.
    template_tokens: dict[str, int]
    # Tokens that it reported beyond the bytes sent or seen. They were not billed.
    unbilled_tokens: int
    # When it came, in Unix time.
    since_unix_s: float
    # Its room, by model.
    places: dict[str, Places]
    # Requests that it answered, and those that it refused, failed or left, while this process runs.
    answers: int
    failures: int
    # Challenges that it did not answer rightly.
    failed_proofs: int


@dataclass(frozen=True, slots=True)
class GoneProvider:
    """Describe a provider that has gone and is not back, and how it went."""

    name: str
    identity: str
    level: str
    reason: str
    since_unix_s: float
    how: Departure


@dataclass(frozen=True, slots=True)
class RefusedProviders:
    """Count the registrations that were refused for one reason, the last of them at ``last_unix_s``."""

    reason: str
    times: int
    last_unix_s: float


class OfferedModel(msgspec.Struct, frozen=True):
    """Describe a model that is served or has a price, as ``/v1/models`` does too.

    A consumer gets the providers, and of the requests only its own account's.
    """

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
    # Providers that went without draining, and those that an administrator removed.
    num_lost: int
    num_removed: int
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
