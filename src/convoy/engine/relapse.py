"""What runs whenever the stages fail although every member is there: a request that no stage can run.

Replayed for ever, it would hold up everybody. Who was in flight at one failure after another, without a new
token between, is ended; a sequence that gains a token, or was not in flight once, is innocent again. From the
second failure on such sequences are run one after another, so that none is ended for what ran beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from convoy.engine.continuation import Continuation
from convoy.engine.sequence import Sequence
from convoy.errors import ConvoyError, StageLost

MAX_FAILURES = 8


class Relapses:
    """Not thread-safe: the engine holds a lock."""

    def __init__(self) -> None:
        self._seen: dict[Sequence, tuple[int, int]] = {}  # tokens, and failures since it has so many

    @property
    def suspects(self) -> list[Sequence]:
        """Who failed more than once since its last token."""
        return [sequence for sequence, (_, count) in self._seen.items() if count > 1]

    def hopeless(
        self, live: Mapping[Sequence, Continuation], in_flight: Iterable[Sequence], error: StageLost
    ) -> list[tuple[object, ConvoyError]]:
        """The groups to end after one more failure, and why."""
        counted: dict[Sequence, tuple[int, int]] = {}
        groups = []
        for sequence in dict.fromkeys(one for one in in_flight if one in live):
            num_tokens, count = self._seen.get(sequence, (-1, 0))
            count = count + 1 if num_tokens == len(sequence.tokens) else 1
            counted[sequence] = len(sequence.tokens), count
            if count >= MAX_FAILURES:
                groups.append(live[sequence].group)
        self._seen = counted
        public = f"the stages failed at the request {MAX_FAILURES} times in a row"
        hint = "the log of the member that failed says more"
        text = f"{public}: {error.message}"
        return [(group, StageLost(text, hint=hint, public=public)) for group in groups]
