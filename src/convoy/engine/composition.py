"""A step in the making: who runs how many tokens and which blocks are granted, until it is written down."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from convoy.engine.prefix import PrefixTags
from convoy.engine.sequence import Sequence
from convoy.wire.messages import BlockGrant, Row, Step


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step and, for each of its rows, the sequence it belongs to and the drafts at its end."""

    step: Step
    sequences: tuple[Sequence, ...]
    drafts: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Composition:
    """``rows``: how many tokens of whom, ``drafts`` included, which are the last of a row."""

    rows: dict[Sequence, int] = field(default_factory=dict)
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    grants: list[BlockGrant] = field(default_factory=list)
    num_tokens: int = 0

    def add(self, sequence: Sequence, num_tokens: int, drafts: SequenceOf[int]) -> None:
        """A row of ``num_tokens``, the ``drafts`` at its end included; at most one of each sequence."""
        self.rows[sequence] = num_tokens
        self.num_tokens += num_tokens
        if drafts:
            self.drafts[sequence] = list(drafts)

    def known_end(self, sequence: Sequence) -> int:
        """Where the row's known tokens end and its drafts begin."""
        return sequence.num_scheduled + self.rows[sequence] - len(self.drafts.get(sequence, ()))

    def write(self, number: int, released: list[int], tags: PrefixTags) -> Scheduled:
        """The step, with every row from where its sequence stands now."""
        rows = []
        tokens: list[int] = []
        for sequence, num_tokens in self.rows.items():
            drafts = self.drafts.get(sequence, [])
            start, known = sequence.num_scheduled, self.known_end(sequence)
            num_outputs = (1 + len(drafts)) * int(known == len(sequence.tokens))
            if sequence.all_outputs and start < sequence.num_prompt:
                num_outputs = num_tokens
            rows.append(_tagged_row(tags, sequence, num_tokens, num_outputs, drafts))
            tokens.extend(sequence.tokens[start:known])
            tokens.extend(drafts)
        encoded = np.array(tokens, dtype="<u4").tobytes()
        drafted = tuple([tuple(self.drafts.get(sequence, ())) for sequence in self.rows])
        return Scheduled(Step(number, released, self.grants, rows, encoded), tuple(self.rows), drafted)


def _tagged_row(
    tags: PrefixTags, sequence: Sequence, num_tokens: int, num_outputs: int, drafts: SequenceOf[int]
) -> Row:
    start, end = sequence.num_scheduled, sequence.num_scheduled + num_tokens
    # Tags of blocks that end in drafts must not be taken for the sequence's own.
    chain = list(sequence.tags) if drafts else sequence.tags
    tokens = [*sequence.tokens, *drafts] if drafts else sequence.tokens
    tag, after = tags.of_row(chain, tokens, start, end, num_outputs)
    return Row(sequence.table_id, start, num_tokens, num_outputs, tag, after)
