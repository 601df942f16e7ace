"""How a coordinator and a provider behave; resolved once, by the command line."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from convoy.api.traces import NO_TRACES, Traces
from convoy.fleet.asked import ModelOptions
from convoy.fleet.coordinator.authority import LOOPBACK_NAMES
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.trust.audit import AuditLog
from convoy.trust.evidence.provider import ProviderRules


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """``models``: those that are known by name; a provider may offer others, which are free."""

    instance: str = "coordinator"
    authorities: tuple[str, ...] = ()  # host:port by which providers may have dialled
    names: tuple[str, ...] = LOOPBACK_NAMES  # else under these names, at any port: its certificate's
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    queue: QueueLimits = field(default_factory=QueueLimits)
    window: int = 32  # chunks of an answer that may be under way
    greeting_s: float = 20.0  # for a provider to gather its evidence and register
    silence_s: float = 20.0  # without a heartbeat, and a provider is gone
    prove_every_s: float = 300.0
    max_failed_proofs: int = 3
    trust: ProviderRules = field(default_factory=ProviderRules)  # what evidence of providers must show
    first_token_s: float = 60.0  # beside what reading the prompt should take
    whole_s: float = 900.0  # more for one that is no stream, while its provider says it is there
    chunk_s: float = 120.0  # between two chunks
    max_attempts: int = 5
    lease_use_s: float = 15.0  # for a sealed body to come
    max_leases: int = 256  # of one account, whose bodies are awaited
    max_providers: int = 100_000
    max_greeting: int = 256  # sockets at once that have not registered yet
    max_greeting_of_address: int = 32  # of them, of one address that is not this machine's
    approval_s: float = 120.0  # that a provider whose key nobody let in yet may wait on its socket
    approval_poll_s: float = 2.0  # between two looks at whether another coordinator let it in
    max_unapproved: int = 64  # sockets that wait so
    max_unapproved_of_address: int = 8  # of them, of one address that is not this machine's
    traces: Traces = NO_TRACES
    audit: AuditLog | None = None  # of what administrators do
    cache_key: bytes = field(
        default_factory=lambda: secrets.token_bytes(32), repr=False
    )  # of accounts' salts
    body_key: bytes = field(
        default_factory=lambda: secrets.token_bytes(32), repr=False
    )  # of bodies that come with an Idempotency-Key: it is kept, but not in the database
    forget_every_s: float = 600.0  # keys and HMACs that are a day old
