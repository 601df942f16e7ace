"""Count the tokens of an answer, give it its id, and declare the seam between an endpoint and its events."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.engine.outputs import EmbeddingOutput, FinishOutput, Output, TokenOutput


class ResponseBuilder(Protocol):
    """Build an answer from every output in order, as stream events or as one body.

    An event of a tagged struct is sent under the name of its tag.
    """

    @property
    def counter(self) -> UsageCounter: ...

    @property
    def end(self) -> bytes:
        """Return the bytes that end a complete stream, after its last event."""
        ...

    def opening(self) -> Sequence[msgspec.Struct]:
        """Return the events before the first token."""
        ...

    def keep_alive(self) -> Sequence[msgspec.Struct]:
        """Return the events that a silent stream sends; without any, it sends a comment."""
        ...

    def events(self, index: int, output: Output) -> Sequence[msgspec.Struct]:
        """Return the events that an output of request ``index`` adds to the stream."""
        ...

    def closing(self) -> Sequence[msgspec.Struct]:
        """Return the events after the last choice."""
        ...

    def failure(self, error: BaseException) -> Sequence[msgspec.Struct]:
        """Return the events that end a stream which ``error`` breaks."""
        ...

    def add(self, index: int, output: Output) -> None:
        """Keep an output for `whole`."""
        ...

    def whole(self) -> msgspec.Struct:
        """Return the complete body, once every choice is finished."""
        ...


@dataclass(slots=True)
class UsageCounter:
    """Count the tokens of one answer."""

    asked: ParsedRequest
    prefix: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    # Counted as choices finish.
    cached_tokens: int = 0
    # Monotonic time.
    first_token_s: float | None = None
    # The longest wait of a prompt, known once its first choice has finished.
    queued_s: float = 0.0
    # How long the request waited until its model was loaded.
    load_s: float = 0.0

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    def count(self, output: Output) -> None:
        """Count one output. Call it once per output."""
        if isinstance(output, TokenOutput | EmbeddingOutput):
            self.completion_tokens += isinstance(output, TokenOutput)
            if self.first_token_s is None:
                self.first_token_s = time.monotonic()
        elif isinstance(output, FinishOutput) and output.choice == 0:
            # Count a prompt once, however many choices it has.
            self.cached_tokens += output.cached_tokens
            self.queued_s = max(self.queued_s, output.queued_s)

    def choice_of(self, index: int, output: TokenOutput | FinishOutput) -> int:
        """Return the number of a choice among the choices of all prompts."""
        return index * self.asked.num_choices + output.choice

    @property
    def num_choices(self) -> int:
        return len(self.asked.requests) * self.asked.num_choices
