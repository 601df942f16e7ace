"""The owner of a sequence: a choice of a request, or a session.

The engine knows owners by this Protocol alone.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

from convoy.engine.outputs import FinishReason
from convoy.engine.sequence import Sequence
from convoy.errors import ConvoyError
from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.wire.messages.control import Row


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
