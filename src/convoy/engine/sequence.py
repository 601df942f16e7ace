"""A sequence: one continuation of one prompt, as the scheduler tracks it, with its owner and its drafter.

An owner is a choice of a request, or a session. A drafter guesses tokens. The engine knows both by their
Protocols alone.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from convoy.engine.outputs import FinishReason
from convoy.errors import ConvoyError
from convoy.model.constraints.matcher import Matcher
from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.wire.messages.control import Row


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
    brings. It is greater by one while a row runs on a fed token, which only the stages know yet.
    """

    prompt_ids: tuple[int, ...]
    max_tokens: int
    # Prompt log-probabilities need the logits of every position.
    all_outputs: bool = False
    # Only sequences of equal salt may share blocks.
    salt: bytes = b""
    # The place of the generated tokens in the request's grammar.
    matcher: Matcher | None = None
    # Whether its next token can be sampled while only the stages know the one before.
    feeds: bool = False
    tokens: list[int] = field(init=False)
    # The most tokens that there is room for after a loss.
    wall: int = field(init=False, default=sys.maxsize)
    # The distance of the two best tokens below which they tie, where stages with other bits replayed it.
    near_tie: float = field(init=False, default=0.0)
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
    # Where it keeps the state of its prefix for later sequences, in groups that do not keep every token.
    marks: frozenset[int] = field(init=False, default=frozenset())
    # The tag of its last state between marks.
    passing: bytes | None = field(init=False, default=None)
    # The scheduler's turn that planned its last row.
    turn: int = field(init=False, default=0)
    # The step of its last row if that row began with a fed token, else -1.
    fed_step: int = field(init=False, default=-1)
    # The last step in which it ran on a wrong token: the result there does not count.
    void_step: int = field(init=False, default=-1)
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


@dataclass(frozen=True, slots=True)
class RowResult:
    """Tell how many drafts of a row were accepted, and whether the sequence is complete or rests.

    A sequence that rests has all that its owner asked for. The engine forgets it until `Engine.resume`.
    """

    num_accepted: int = 0
    complete: bool = False
    rests: bool = False


class SequenceOwner(Protocol):
    """Receive the results of one sequence. The engine calls it on its own thread alone, under its lock."""

    @property
    def sequence(self) -> Sequence: ...

    @property
    def group(self) -> object:
        """Return the owner's group: its members fail together, and one of them receives the error."""

    def sample_jobs(self, row: Row, drafts: SequenceOf[int]) -> list[SampleJob]:
        """Return one sampling job for each output of ``row``.

        The row's last ``len(drafts)`` tokens are guesses.
        """

    def advance(self, row: Row, drafts: SequenceOf[int], outcomes: SequenceOf[SampleResult]) -> RowResult:
        """Process the results of the jobs from `sample_jobs`.

        Raises ConvoyError for a failure that ends the whole group.
        """

    def finish(self, reason: FinishReason) -> None:
        """End the sequence and tell the client; a second call does nothing."""

    def fail(self, error: ConvoyError | None) -> None:
        """End the sequence and report ``error`` to the client; with None, another owner of the group does."""


class Drafter(Protocol):
    """Guess the next tokens of a sequence."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """Return at most ``max_tokens`` guesses, or none."""

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Record how many of the last guesses were accepted."""

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that is over."""
