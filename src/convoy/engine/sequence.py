"""A sequence: one continuation of one prompt, as the scheduler tracks it."""

from __future__ import annotations

import enum
import sys
from dataclasses import dataclass, field


class SequenceState(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    IDLE = "idle"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Known tokens, how far they have been scheduled, and the blocks that hold their K/V, by cache group.

    ``tokens`` is the prompt and then what was generated. ``num_scheduled`` positions are computed or on their
    way; when it reaches ``len(tokens)`` the sequence waits for its next token, which the step in flight will
    bring.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    all_outputs: bool = False  # prompt log-probabilities need every position's logits
    salt: bytes = b""  # of whom the sequence may share blocks with
    tokens: list[int] = field(init=False)
    wall: int = field(init=False, default=sys.maxsize)  # tokens that there is room for after a loss
    shaken: bool = field(init=False, default=False)  # run again by stages that compute other bits
    num_near_ties: int = field(init=False, default=0)  # since then; see `engine.requests.near_tie`
    state: SequenceState = field(init=False, default=SequenceState.WAITING)
    num_scheduled: int = field(init=False, default=0)
    num_in_flight: int = field(init=False, default=0)
    tables: list[list[int]] = field(init=False, default_factory=list)  # none while it has no blocks
    table_id: int = field(init=False, default=-1)  # its name on the wire, new at each admission
    tags: list[bytes] = field(init=False, default_factory=list)  # T at 0 and at the ends of its first blocks
    num_cached: int | None = field(init=False, default=None)  # prompt tokens that its first admission found

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
        """Known tokens that no step carries yet."""
        return len(self.tokens) - self.num_scheduled
