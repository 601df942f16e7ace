"""Run every token of a vocabulary as the next one after known tokens, many in one step of a stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from convoy.model.stage import LoadedStage
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import PREFIX_TAG_BYTES, BlockGrant, Row, Step

_ROWS = 1024


class Candidates(Protocol):
    """Declare a stage with the embedding that computes the activations of tokens."""

    def sent(self, prompt: Sequence[int]) -> torch.Tensor:
        """Return [T, hidden_size]: the activations of ``prompt`` that the next stage receives."""
        ...

    def rows(self, known: Sequence[int]) -> Iterable[torch.Tensor]:
        """Yield [n, hidden_size] for each next token after ``known``, in the order of the vocabulary."""
        ...


def candidates_of(spec: ModelSpec, stage: LoadedStage, num_tokens: int) -> Candidates:
    """Return candidates for prompts of at most ``num_tokens``.

    They share the prefix's K/V if the model's cache allows that. Otherwise they run the prefix again.
    """
    groups = spec.cache_groups
    is_full = len(groups) == 1 and groups[0].attends and groups[0].window is None and groups[0].stride == 1
    kind = CachedPrefix if is_full else RepeatedPrefix
    return kind(spec, stage, num_tokens)


class _Runner:
    """Run steps on one stage. Released sequences end with the next step."""

    def __init__(self, spec: ModelSpec, stage: LoadedStage, num_tokens: int) -> None:
        self._spec = spec
        self._stage = stage
        self._num_tokens = num_tokens
        self._number = 0
        self._sequence = 0
        self._released: list[int] = []

    def _new(self) -> int:
        self._sequence += 1
        return self._sequence

    def _run(self, grants: list[BlockGrant], rows: list[Row], tokens: Sequence[int]) -> torch.Tensor:
        self._number += 1
        released, self._released = self._released, []
        step = Step(self._number, released, grants, rows, b"")
        hidden = self._stage.run(step, None, torch.tensor(tokens, dtype=torch.int64))
        return hidden.detach().to("cpu", torch.float32)


class CachedPrefix(_Runner):
    """Share the known prefix's blocks between candidates, with one block for each token.

    One sequence, the base, holds the known tokens, and its blocks come first. Each candidate has one block of
    its own.
    """

    def __init__(self, spec: ModelSpec, stage: LoadedStage, num_tokens: int) -> None:
        super().__init__(spec, stage, num_tokens)
        self._batch = min(_ROWS, spec.vocab_size)
        stage.make_pools([num_tokens + max(self._batch, num_tokens)])
        self._known: list[int] = []
        self._base: int | None = None

    def sent(self, prompt: Sequence[int]) -> torch.Tensor:
        sequence = self._new()
        blocks = list(range(len(prompt)))
        row = Row(sequence, 0, len(prompt), 1)
        hidden = self._run([BlockGrant.append(sequence, 0, blocks)], [row], prompt)
        self._released.append(sequence)
        return hidden

    def rows(self, known: Sequence[int]) -> Iterator[torch.Tensor]:
        self._extend(known)
        at = len(known)
        shared = b"".join(_tag(position + 1) for position in range(at))
        for first in range(0, self._spec.vocab_size, self._batch):
            tokens = range(first, min(first + self._batch, self._spec.vocab_size))
            sequences = [self._new() for _ in tokens]
            grants = [
                BlockGrant.append(sequence, 0, [*range(at), self._num_tokens + index], shared)
                for index, sequence in enumerate(sequences)
            ]
            tags = _tag(at + 1) * 2
            rows = [Row(sequence, at, 1, 1, _tag(at), tags) for sequence in sequences]
            hidden = self._run(grants, rows, list(tokens))
            self._released += sequences
            yield hidden

    def _extend(self, known: Sequence[int]) -> None:
        """Run the known tokens that the base lacks. A base with other tokens is replaced."""
        if self._base is None or list(known[: len(self._known)]) != self._known:
            self._released += [] if self._base is None else [self._base]
            self._base, self._known = self._new(), []
        start, end = len(self._known), len(known)
        if start == end:
            return
        ends = b"".join(_tag(position + 1) for position in range(start, end))
        row = Row(self._base, start, end - start, 1, _tag(start), ends + _tag(end))
        grant = BlockGrant.append(self._base, 0, list(range(start, end)))
        self._run([grant], [row], known[start:])
        self._known = list(known)


class RepeatedPrefix(_Runner):
    """Run each candidate as a sequence with all known tokens, for windows, states and compressed K/V."""

    def __init__(self, spec: ModelSpec, stage: LoadedStage, num_tokens: int) -> None:
        super().__init__(spec, stage, num_tokens)
        self._batch = max(1, min(_ROWS // num_tokens, spec.vocab_size))
        stage.make_pools([self._batch * self._each(index) for index in range(len(spec.cache_groups))])

    def sent(self, prompt: Sequence[int]) -> torch.Tensor:
        return self._replay([list(prompt)])

    def rows(self, known: Sequence[int]) -> Iterator[torch.Tensor]:
        length = len(known) + 1
        for first in range(0, self._spec.vocab_size, self._batch):
            last = min(first + self._batch, self._spec.vocab_size)
            hidden = self._replay([[*known, token] for token in range(first, last)])
            yield hidden[length - 1 :: length]

    def _replay(self, texts: list[list[int]]) -> torch.Tensor:
        grants, rows = [], []
        for index, text in enumerate(texts):
            sequence = self._new()
            for group in range(len(self._spec.cache_groups)):
                each = self._each(group)
                grants.append(
                    BlockGrant.append(sequence, group, list(range(index * each, (index + 1) * each)))
                )
            rows.append(Row(sequence, 0, len(text), 1))
        hidden = self._run(grants, rows, [token for text in texts for token in text])
        self._released += [row.sequence for row in rows]
        return hidden

    def _each(self, index: int) -> int:
        """Return the blocks of one sequence; a window's ring has at most as many as its longest row needs."""
        group, size = self._spec.cache_groups[index], self._stage.block_size
        wanted = max(1, group.num_blocks(self._num_tokens, size))
        ring = group.ring_blocks(size, self._num_tokens)
        return wanted if ring is None else min(wanted, ring)


def _tag(position: int) -> bytes:
    """Return the tag of the prefix before ``position``.

    The base is the only prefix, so its length identifies it.
    """
    return position.to_bytes(PREFIX_TAG_BYTES, "little")
