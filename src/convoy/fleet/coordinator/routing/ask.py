"""What routing knows of a request: never its text."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.trust.evidence.level import Level

MAX_TAG_BYTES = 32


@dataclass(frozen=True, slots=True)
class Trusted:
    """Whom somebody sends anything: providers by their keys, and those of operators by theirs."""

    identities: frozenset[bytes]
    operators: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Owner:
    """A provider's key, and its operator's if that certified it."""

    identity: bytes
    operator: bytes | None = None


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request of ``account`` for ``model``, as the coordinator counts it.

    ``max_tokens`` is the most that it may give, over all its choices; ``tag`` names the beginning of its
    prompt, so that whoever has read that before may be asked again (empty: no such name). Times are of one
    monotonic clock, in seconds.
    """

    number: int
    account: str
    model: str
    prompt_tokens: int
    max_tokens: int
    arrived_s: float
    deadline_s: float  # in the queue no longer than until then
    level: Level = Level.NONE  # the least that whoever serves it must have proved
    tag: bytes = b""
    excluded: frozenset[str] = field(default_factory=frozenset)  # providers that failed it already
    trusted: Trusted | None = None  # no others, where any of these is here; None: all
