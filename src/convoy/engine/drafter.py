"""Who guesses what a sequence says next, as the scheduler sees it."""

from __future__ import annotations

from typing import Protocol

from convoy.engine.sequence import Sequence


class Drafter(Protocol):
    """Guesses what a sequence says next."""

    def propose(self, sequence: Sequence, max_tokens: int) -> list[int]:
        """At most ``max_tokens`` guesses; none is fine."""

    def learn(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """What came of the last guesses."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence is over."""
