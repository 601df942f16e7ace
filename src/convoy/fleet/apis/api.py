"""Define the row of an API: what a coordinator, a proxy and a provider must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from convoy.api.problem import ErrorBody, ErrorDetail, answer_for, body_for

Fields = dict[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class EventFacts:
    """Hold what one event of a stream, or one whole answer, tells."""

    # The tokens that the event gives.
    tokens: int = 0
    # The counts of the answer so far.
    usage: object = None
    # The values whose texts a client shows.
    texts: Sequence[object] = ()
    # The answer is complete.
    ended: bool = False
    # The event has the counts and nothing else.
    only_usage: bool = False
    # The event only says that the engine is there.
    silent: bool = False
    # The error object of an answer that broke.
    error: object = None


class EventForm(Protocol):
    """Write the events that a coordinator or a proxy adds to one stream of an engine."""

    def pass_on(self, event: bytes) -> bytes:
        """Return the bytes for the client of one event, which has no end yet."""
        ...

    def is_last(self, event: bytes) -> bool:
        """Return whether a client may close its connection once it has this event of the engine."""
        ...

    def keep_alive(self) -> bytes:
        """Return the events of a silent stream, also before the engine's first event."""
        ...

    def failure(self, error: BaseException) -> Sequence[msgspec.Struct]:
        """Return the events that end a stream which ``error`` breaks."""
        ...

    def refused(self, status: int, body: bytes) -> bytes:
        """Return the events that end a stream with an answer's refusal."""
        ...

    def streams(self, status: int, body: bytes) -> bool:
        """Return whether a refusal is sent as a stream although none has begun."""
        ...


@dataclass(frozen=True, slots=True)
class FleetApi:
    """Describe one kind of request.

    ``rebuild`` returns the fields for an engine. ``read`` reads an event or a whole answer. ``form`` makes
    the writer of a stream's events for a model. ``problem`` writes an error under its status.
    """

    path: str
    # The field in which the prompt begins.
    prompt: str
    rebuild: Callable[[Fields, bool], dict[str, Any]]
    read: Callable[[Mapping[str, Any]], EventFacts]
    form: Callable[[str], EventForm]
    problem: Callable[[int, ErrorDetail], msgspec.Struct] = lambda _, detail: ErrorBody(detail)
    # The fields that limit the answer. The first one that is given counts, and the last one reaches engines.
    limits: tuple[str, ...] = ("max_tokens",)
    # A request must name its limit.
    needs_limit: bool = False
    # Fields that multiply the answers.
    multipliers: tuple[str, ...] = ()
    # The names of a limit on other servers are refused. Without this, unknown fields are left out.
    is_strict: bool = False
    # An engine generates. Without this, it only counts tokens.
    generates: bool = True
    # Ends the stream of an engine that gives more than was asked. Without it, that stream breaks.
    stream_end: bytes = b""
    # Raises `RequestError` for a body that no member of the fleet can answer.
    check: Callable[[Mapping[str, Any]], None] = lambda _: None

    def problem_of(self, error: BaseException) -> msgspec.Struct:
        """Return an error in this API's form."""
        return self.problem(answer_for(error).status, body_for(error).error)
