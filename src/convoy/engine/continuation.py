"""What stands behind a sequence: a choice of a request, or a session. The engine knows no more of it."""

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
    """What a row came to: how many of its drafts stand, and whether the sequence is complete, or rests.

    One that rests has what it was asked for: the engine knows it no more until `Engine.resume`.
    """

    num_accepted: int = 0
    complete: bool = False
    rests: bool = False


class SequenceOwner(Protocol):
    """Called on the engine's thread alone, under its lock."""

    @property
    def sequence(self) -> Sequence: ...

    @property
    def group(self) -> object:
        """Those of one group fail together, and one of them is told."""

    def draws(self, row: Row, drafts: SequenceOf[int]) -> list[SampleJob]:
        """One for each output of ``row``, whose last ``len(drafts)`` tokens are guesses."""

    def advance(self, row: Row, drafts: SequenceOf[int], outcomes: SequenceOf[SampleResult]) -> RowResult:
        """Take what came of `draws`. Raises ConvoyError for what ends its whole group."""

    def finish(self, reason: FinishReason) -> None:
        """It is over, and whoever waits is told; a second call does nothing."""

    def fail(self, error: ConvoyError | None) -> None:
        """It is over. ``error``: to be told to whoever waits; None where another of the group tells it."""
