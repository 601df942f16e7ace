"""Describe a request as routing knows it: never its text."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.trust.evidence.level import Level


@dataclass(frozen=True, slots=True)
class Trusted:
    """Hold the providers that a client would send anything to, by their own or their operators' keys."""

    identities: frozenset[bytes]
    operators: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Owner:
    """Hold a provider's key, and its operator's key if the operator certified it."""

    identity: bytes
    operator: bytes | None = None


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """Describe a request of ``account`` for ``model``, as the coordinator counts it.

    ``max_tokens`` is the most that it may give, over all its choices. ``tag`` names the beginning of its
    prompt, so that a provider that has read it before may be asked again; empty means no name. Times are of
    one monotonic clock, in seconds.
    """

    number: int
    account: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    # The request waits in the queue no longer than until then.
    deadline_s: float
    # The least level that its provider must have proved.
    level: Level = Level.NONE
    tag: bytes = b""
    # Providers that failed it already.
    excluded: frozenset[str] = field(default_factory=frozenset)
    # If any of these is connected, no other provider; None: every provider.
    trusted: Trusted | None = None
