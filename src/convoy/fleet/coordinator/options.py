"""Hold the options of a coordinator; the command line resolves them once."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from convoy.api.traces import NO_TRACES, Traces
from convoy.fleet.consumer_request import ModelOptions
from convoy.fleet.coordinator.authority import LOOPBACK_NAMES
from convoy.fleet.coordinator.routing.dispatch import QueueLimits
from convoy.trust.audit import AuditLog
from convoy.trust.evidence.provider import ProviderRules


@dataclass(frozen=True, slots=True)
class CoordinatorOptions:
    """Hold a coordinator's options.

    ``models`` are the models known by name. A provider may offer others, which are free.
    """

    instance: str = "coordinator"
    # The host:port addresses by which providers may have dialled.
    authorities: tuple[str, ...] = ()
    # Without ``authorities``, providers may dial these names at any port: those of the certificate.
    names: tuple[str, ...] = LOOPBACK_NAMES
    models: Mapping[str, ModelOptions] = field(default_factory=dict)
    queue: QueueLimits = field(default_factory=QueueLimits)
    # Chunks of an answer that may be in flight.
    window: int = 32
    # A provider has this long to gather its evidence and register.
    greeting_s: float = 20.0
    # A provider without a heartbeat for this long is gone.
    silence_s: float = 20.0
    # A provider has this long to take the last messages, before its connection is cut.
    close_s: float = 5.0
    prove_every_s: float = 300.0
    max_failed_proofs: int = 3
    # What the evidence of providers must show.
    trust: ProviderRules = field(default_factory=ProviderRules)
    # This is added to the time that reading the prompt should take.
    first_token_s: float = 60.0
    # This is added for an answer that is not streamed, while its provider says that it is alive.
    whole_s: float = 900.0
    # The longest wait between two chunks.
    chunk_s: float = 120.0
    max_attempts: int = 5
    # A lease waits this long for its sealed body.
    lease_use_s: float = 15.0
    # Leases of one account that wait for their bodies.
    max_leases: int = 256
    max_providers: int = 100_000
    # Sockets at once that have not registered yet.
    max_greeting: int = 256
    # The part of them that one address may have. This machine's own addresses have no such limit.
    max_greeting_of_address: int = 32
    # How long a provider with a key that is not approved may wait on its socket.
    approval_s: float = 120.0
    # The wait between two checks whether another coordinator has approved the provider.
    approval_poll_s: float = 2.0
    # Sockets that wait for approval.
    max_unapproved: int = 64
    # The part of them that one address may have. This machine's own addresses have no such limit.
    max_unapproved_of_address: int = 8
    traces: Traces = NO_TRACES
    # Records what administrators do.
    audit: AuditLog | None = None
    # The key of the accounts' cache salts.
    cache_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    # The key of the MACs of bodies that come with an Idempotency-Key. It is kept outside the database.
    body_key: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    # How often keys and HMACs that are a day old are forgotten.
    forget_every_s: float = 600.0
