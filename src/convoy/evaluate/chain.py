"""Join stages in one process, without links, and count the layers that each step runs."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import LoadedStage, StageOptions
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import BlockGrant, Row, StageAssignment, Step


class StageLoader(Protocol):
    """Return a stage as `load_member_stage` does, reusing the layers of ``before``."""

    def __call__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        *,
        before: LoadedStage | None = None,
    ) -> LoadedStage: ...


class StageChain:
    """Run the stages of one layout. Grant K/V blocks as a head would, and count the layers that run."""

    def __init__(self, spec: ModelSpec, stages: Sequence[LoadedStage], lengths: Sequence[int]) -> None:
        """Make pools for sequences that live at once. ``lengths`` are their final lengths, in tokens."""
        self.stages = list(stages)
        # By layer that did not run exactly once in a step: how often it ran.
        self.wrong_layers: dict[int, int] = {}
        self._spec = spec
        self._block_size = self.stages[0].block_size
        in_full = sum(-(-length // self._block_size) for length in lengths)
        num_blocks = [len(lengths) if g.is_state else in_full for g in spec.cache_groups]
        self._free = [list(range(count)) for count in num_blocks]
        # A sequence's number on the wire, which no other sequence ever gets.
        self._ids: dict[int, int] = {}
        self._tables: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, int] = {}
        self._released: list[int] = []
        self._numbers, self._unused = itertools.count(), itertools.count()
        for stage in self.stages:
            stage.make_pools(num_blocks)

    def run(self, rows: Sequence[tuple[int, Sequence[int]]], max_row_tokens: int) -> list[torch.Tensor]:
        """Return logits [n, vocabulary] for each (sequence, n tokens), appended to the sequence's earlier
        tokens.

        ``max_row_tokens`` is the longest row that these sequences will ever have: it sizes their rings.
        """
        step = self._step(rows, max_row_tokens)
        ids = torch.tensor([token for _, tokens in rows for token in tokens], dtype=torch.int64)
        ran: Counter[int] = Counter()
        hidden: torch.Tensor | None = None
        for stage in self.stages:
            mine = stage.assignment
            needs_ids = mine.embed or self._spec.needs_token_ids(mine.start, mine.end)
            with _counted(stage.layers, ran):
                hidden = stage.run(step, hidden, ids if needs_ids else None)
        self._account(ran)
        assert hidden is not None
        owner = next(stage for stage in self.stages if stage.assignment.output)
        logits = owner.output(owner.select(step, hidden))
        return list(torch.split(logits, [len(tokens) for _, tokens in rows]))

    def release(self, sequence: int) -> None:
        """Free a sequence's blocks. The stages learn of it with the next step."""
        number = self._ids.pop(sequence)
        self._released.append(number)
        del self._lengths[number]
        for free, blocks in zip(self._free, self._tables.pop(number), strict=True):
            free.extend(blocks)

    def _step(self, rows: Sequence[tuple[int, Sequence[int]]], max_row_tokens: int) -> Step:
        released, self._released = self._released, []
        grants: list[BlockGrant] = []
        wire_rows = []
        for sequence, tokens in rows:
            number = self._ids.setdefault(sequence, next(self._unused))
            start = self._lengths.get(number, 0)
            grants += self._grants(number, start + len(tokens), max_row_tokens)
            wire_rows.append(Row(number, start, len(tokens), len(tokens)))
            self._lengths[number] = start + len(tokens)
        return Step(next(self._numbers), released, grants, wire_rows, b"")

    def _grants(self, sequence: int, num_tokens: int, max_row_tokens: int) -> Iterator[BlockGrant]:
        tables = self._tables.setdefault(sequence, [[] for _ in self._free])
        for index, (table, free) in enumerate(zip(tables, self._free, strict=True)):
            group = self._spec.cache_groups[index]
            ring = group.ring_blocks(self._block_size, max_row_tokens)
            wanted = group.num_blocks(num_tokens, self._block_size)
            missing = (wanted if ring is None else min(wanted, ring)) - len(table)
            if missing > 0:
                blocks = [free.pop() for _ in range(missing)]
                table.extend(blocks)
                yield BlockGrant.append(sequence, index, blocks)

    def _account(self, ran: Counter[int]) -> None:
        for layer in range(self._spec.num_layers):
            if ran[layer] != 1:
                self.wrong_layers.setdefault(layer, ran[layer])


@contextmanager
def _counted(layers: Mapping[int, nn.Module], ran: Counter[int]) -> Iterator[None]:
    """Count each call of a layer under its number in the whole model."""

    def count(layer: int) -> Callable[..., None]:
        return lambda *_: ran.update((layer,))

    # Take layers by key. Iterating as the stage does would share a fault that this count must find.
    hooks = [layers[layer].register_forward_hook(count(layer)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
