"""Run one request to its end for a caller that waits, as `convoy run --prompt` and `convoy eval` do."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass

from convoy.engine.engine import Engine
from convoy.engine.outputs import ErrorOutput, FinishOutput, FinishReason, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest


@dataclass(frozen=True, slots=True)
class Completion:
    """Hold the complete answer of one choice; times are seconds since submission, by a monotonic clock."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    time_to_first_token_s: float
    total_s: float

    @property
    def decode_tokens_per_s(self) -> float:
        """Return the rate after the first token, in tokens per second; 0 if there is no second token."""
        seconds = self.total_s - self.time_to_first_token_s
        return (len(self.token_ids) - 1) / seconds if len(self.token_ids) > 1 and seconds > 0 else 0.0


def generate(
    engine: Engine, request: GenerationRequest, on_text: Callable[[str], None] | None = None
) -> Completion:
    """Submit ``request``, wait for its end and return its one answer.

    Raises the engine's errors. An interrupted wait aborts the request.
    """
    assert request.num_choices == 1, "generate() returns one answer"
    outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
    started = time.monotonic()
    handle = engine.submit(request, outputs.put)
    pieces: list[str] = []
    token_ids: list[int] = []
    first_s = 0.0
    try:
        while True:
            output = outputs.get()
            if isinstance(output, ErrorOutput):
                raise output.error
            if isinstance(output, TokenOutput):
                # Only the first token sets the time to the first token.
                first_s = first_s or time.monotonic() - started
                token_ids.append(output.token_id)
            if isinstance(output, TokenOutput | FinishOutput) and output.text:
                pieces.append(output.text)
                if on_text is not None:
                    on_text(output.text)
            if isinstance(output, FinishOutput):
                total_s = time.monotonic() - started
                return Completion(
                    "".join(pieces),
                    tuple(token_ids),
                    output.reason,
                    len(request.prompt_ids),
                    first_s or total_s,
                    total_s,
                )
    finally:
        handle.abort()
