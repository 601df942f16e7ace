"""Describe a request's trace: the start and end of its parts, and counts; never a prompt or an answer.

Nothing here imports OpenTelemetry. `telemetry.otlp` alone does, and only if traces are switched on. Names are
those of OpenTelemetry's semantic conventions for generative AI (github.com/open-telemetry/
semantic-conventions-genai, in development) where one fits; other names begin with ``convoy.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

Value = str | int | float | bool

MODEL = "gen_ai.request.model"
MAX_TOKENS = "gen_ai.request.max_tokens"
STREAM = "gen_ai.request.stream"
INPUT_TOKENS = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
FIRST_S = "gen_ai.response.time_to_first_chunk"
ERROR = "error.type"
OUTCOME = "convoy.outcome"

_OPERATIONS = {"chat": "chat", "messages": "chat", "responses": "chat", "completion": "text_completion"}
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class TraceSpan(Protocol):
    """Record one request at one place. Times are seconds since the request began."""

    @property
    def traceparent(self) -> str:
        """Return the W3C Trace Context for the next server, with random ids; empty if nothing is traced."""
        ...

    def note(self, values: Mapping[str, Value]) -> None:
        """Set attributes: counts, times and this code's own names; never a prompt, an answer, a token id or a
        key.
        """
        ...

    def part(self, name: str, start_s: float, end_s: float) -> None:
        """Record one part of the request's work."""
        ...

    def end(self, outcome: str) -> None:
        """End the span with ``outcome``: "complete", the class of an error, or other words.

        Later calls change nothing.
        """
        ...


class Traces(Protocol):
    """Create spans and send them on."""

    @property
    def is_on(self) -> bool:
        """Return whether spans are sent anywhere. If not, callers need not record anything."""
        ...

    def begin(self, kind: str, model: str, parent: str = "", ago_s: float = 0.0) -> TraceSpan:
        """Begin the span of a request of ``kind``, such as chat, that came ``ago_s`` seconds ago.

        ``parent`` is the client's traceparent. An invalid one begins a new trace.
        """
        ...


class _NoSpan:
    traceparent = ""

    def note(self, values: Mapping[str, Value]) -> None:
        """Discard the attributes."""

    def part(self, name: str, start_s: float, end_s: float) -> None:
        """Discard the part."""

    def end(self, outcome: str) -> None:
        """Discard the outcome."""


class _NoTraces:
    is_on = False

    def begin(self, kind: str, model: str, parent: str = "", ago_s: float = 0.0) -> TraceSpan:  # noqa: ARG002
        """Return the span that records nothing."""
        return NO_SPAN


NO_SPAN: TraceSpan = _NoSpan()
NO_TRACES: Traces = _NoTraces()


def operation_of(kind: str) -> str:
    """Return the gen_ai.operation.name for a kind of request."""
    return _OPERATIONS.get(kind, kind)


def read_traceparent(text: str) -> tuple[int, int, int] | None:
    """Read trace id, span id and flags of W3C Trace Context, version 00. Return None for anything else."""
    if not _TRACEPARENT.fullmatch(text):
        return None
    _, trace, span, flags = text.split("-")
    return int(trace, 16), int(span, 16), int(flags, 16)
