"""A sequence: one continuation of one prompt, as the scheduler tracks it."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field

from convoy.model.constraints.matcher import Matcher


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Hold the known tokens, how many are scheduled, and the blocks of their K/V for each cache group.

    ``tokens`` is the prompt followed by the generated tokens. ``num_scheduled`` positions are computed or in
    flight. When it reaches ``len(tokens)``, the sequence waits for its next token, which the step in flight
    brings.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    # Prompt log-probabilities need the logits of every position.
    all_outputs: bool = False
    # Only sequences of equal salt may share blocks.
    salt: bytes = b""
    # The place of the generated tokens in the request's grammar.
    matcher: Matcher | None = None
    tokens: list[int] = field(init=False)
    # The most tokens that there is room for after a loss.
    wall: int = field(init=False, default=sys.maxsize)
    # Whether it was replayed by stages that compute other bits.
    replayed_inexact: bool = field(init=False, default=False)
    # Near-ties since then; see `engine.requests.near_tie`.
    num_near_ties: int = field(init=False, default=0)
    state: SequenceState = field(init=False, default=SequenceState.WAITING)
    num_scheduled: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)
    # Empty while it has no blocks.
    tables: list[list[int]] = field(init=False, default_factory=list)
    # The id of its tables on the wire, new at each admission.
    table_id: int = field(init=False, default=-1)
    # T at 0 and at the ends of its first blocks.
    tags: list[bytes] = field(init=False, default_factory=list)
    # Prompt tokens that its first admission found in the prefix cache.
    num_cached: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - len(self.prompt_ids)

    @property
    def generated_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_pending(self) -> int:
        """Return the number of known tokens that no step carries yet."""
        return len(self.tokens) - self.num_scheduled
