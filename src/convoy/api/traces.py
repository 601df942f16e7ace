"""What is traced of a request: when its parts began and ended, and how much of what; never what was said.

Nothing here imports OpenTelemetry; `telemetry.otlp` alone does, and only where traces were asked for. Names
are those of OpenTelemetry's semantic conventions for generative AI (github.com/open-telemetry/
semantic-conventions-genai, in development) where one fits, and begin with ``convoy.`` where none does.
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

_OPERATIONS = {"chat": "chat", "completion": "text_completion"}
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


class TraceSpan(Protocol):
    """One request at one place. Times are seconds since it began."""

    @property
    def traceparent(self) -> str:
        """W3C Trace Context for whoever is asked next: random ids, and empty where nothing is traced."""
        ...

    def note(self, values: Mapping[str, Value]) -> None:
        """Counts, times and names of this code's own; never a prompt, an answer, a token id or a key."""
        ...

    def part(self, name: str, start_s: float, end_s: float) -> None:
        """Something that it did."""
        ...

    def end(self, outcome: str) -> None:
        """``outcome``: complete, the class of an error, or other words. Once; later calls change nothing."""
        ...


class Traces(Protocol):
    """Where spans go."""

    @property
    def is_on(self) -> bool:
        """Whether anybody gets them; where nobody does, nothing need be noted."""
        ...

    def begin(self, kind: str, model: str, parent: str = "", ago_s: float = 0.0) -> TraceSpan:
        """A request of ``kind`` (chat or completion) that came ``ago_s`` ago.

        ``parent``: a traceparent, as whoever asked sent it; one that is none begins a trace of its own.
        """
        ...


class _NoSpan:
    traceparent = ""

    def note(self, values: Mapping[str, Value]) -> None:
        """Nowhere."""

    def part(self, name: str, start_s: float, end_s: float) -> None:
        """Nowhere."""

    def end(self, outcome: str) -> None:
        """Nowhere."""


class _NoTraces:
    is_on = False

    def begin(self, kind: str, model: str, parent: str = "", ago_s: float = 0.0) -> TraceSpan:  # noqa: ARG002
        """Nothing is kept."""
        return NO_SPAN


NO_SPAN: TraceSpan = _NoSpan()
NO_TRACES: Traces = _NoTraces()


def operation_of(kind: str) -> str:
    """gen_ai.operation.name of a kind of request."""
    return _OPERATIONS.get(kind, kind)


def read_traceparent(text: str) -> tuple[int, int, int] | None:
    """Trace id, span id and flags of W3C Trace Context, version 00; None for anything else."""
    if not _TRACEPARENT.fullmatch(text):
        return None
    _, trace, span, flags = text.split("-")
    return int(trace, 16), int(span, 16), int(flags, 16)
