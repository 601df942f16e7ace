"""Compute attention for the rows of a step: prefill chunks one by one, decodes together where that is cheap.

A call of MLX takes sequences of one length. Shorter ones are padded with their own last key, which a mask
hides, so that no sequence reads another's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from convoy.model.kv.pools import BlockTable
from convoy.wire.messages.control import Row

# Decodes share a call if padding adds less than this share of their keys.
MAX_PADDING = 0.25
# Beyond this many, a batch gains nothing and its scores take memory.
_MAX_DECODES = 64

Slots = npt.NDArray[np.int32]


@dataclass(frozen=True)
class AttentionCall:
    """Hold the inputs of one call: queries ``rows`` of the step, and the keys' places in the pool."""

    # [sequences, queries of each]
    rows: mx.array
    num_sequences: int
    # Neighbouring places, of one sequence; None: ``slots``.
    run: slice | None
    slots: mx.array | None
    mask: mx.array | str | None


@dataclass
class MlxPool:
    """Hold one layer's keys and values, [kv_heads, places, head_dim].

    No other reference to either array is kept: MLX writes in place only then, and copies the pool otherwise.
    Without values of their own, the first ``value_dim`` elements of keys are the values.
    """

    keys: mx.array
    values: mx.array | None
    value_dim: int

    @property
    def arrays(self) -> list[mx.array]:
        return [self.keys] if self.values is None else [self.keys, self.values]

    def write(self, batch: AttentionBatch, keys: mx.array, values: mx.array | None) -> None:
        """Write the step's keys and values, [T, kv_heads, head_dim]."""
        self.keys[:, batch.written] = keys.transpose(1, 0, 2)
        if self.values is not None:
            assert values is not None, "this layer has values of its own"
            self.values[:, batch.written] = values.transpose(1, 0, 2)


@dataclass(frozen=True)
class AttentionBatch:
    """Hold what the layers of one cache group need of a step."""

    # Where the rows' keys and values go, [T].
    written: mx.array
    calls: tuple[AttentionCall, ...]
    # The step's rows in the order of the calls' results, or None where it is the step's own.
    order: mx.array | None


@dataclass(frozen=True)
class AttentionMemory:
    """Hold one layer's pool, and what the step reads and writes there."""

    pool: MlxPool
    batch: AttentionBatch


def describe_group(
    rows: Sequence[tuple[Row, BlockTable]], group: int, block_size: int, window: int | None
) -> AttentionBatch:
    """Return the places and calls of checked ``rows``, whose queries follow each other in a step."""
    written, calls, order = [], [], []
    decodes: list[tuple[int, Slots]] = []
    at = 0
    for row, table in rows:
        end = row.start + row.num_tokens
        first = 0 if window is None else max(0, row.start - window + 1)
        slots = slots_of(table.blocks[group], first, end, block_size)
        written.append(slots[row.start - first :])
        if row.num_tokens == 1:
            decodes.append((at, slots))
        else:
            order.append(np.arange(at, at + row.num_tokens))
            calls.append(_chunk(order[-1], slots, _mask(row, first, window)))
        at += row.num_tokens
    for batch in batches_of(decodes):
        order.append(np.array([index for index, _ in batch]))
        calls.append(_decode(order[-1], [slots for _, slots in batch]))
    places = np.concatenate(order)
    back = None if np.array_equal(places, np.arange(at)) else mx.array(np.argsort(places))
    return AttentionBatch(mx.array(np.concatenate(written)), tuple(calls), back)


def slots_of(blocks: Sequence[int], first: int, end: int, block_size: int) -> Slots:
    """Return the places in the pool of positions [first, end); a table of a window is a ring."""
    positions = np.arange(first, end)
    runs, offsets = np.divmod(positions, block_size)
    table = np.asarray(blocks, dtype=np.int64)
    found: Slots = (table[runs % len(blocks)] * block_size + offsets).astype(np.int32)
    return found


def batches_of(decodes: Sequence[tuple[int, Slots]]) -> Iterator[list[tuple[int, Slots]]]:
    """Yield decodes that share a call, longest first: those whose padding stays under `MAX_PADDING`."""
    batch: list[tuple[int, Slots]] = []
    total = 0
    # Sorting is stable, so equal compositions make equal calls.
    for decode in sorted(decodes, key=lambda one: -len(one[1])):
        keys = total + len(decode[1])
        padded = (len(batch) + 1) * len(batch[0][1]) if batch else keys
        if batch and (padded - keys >= MAX_PADDING * keys or len(batch) == _MAX_DECODES):
            yield batch
            batch, keys = [], len(decode[1])
        batch.append(decode)
        total = keys
    if batch:
        yield batch


def attend(
    q: mx.array, pool: MlxPool, batch: AttentionBatch, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Return the attention of ``q`` [T, heads, head_dim] over a pool: [T, heads * value_dim]."""
    found = []
    for call in batch.calls:
        own = q[call.rows].reshape(call.num_sequences, -1, *q.shape[1:]).transpose(0, 2, 1, 3)
        keys = _taken(pool.keys, call)
        values = keys[..., : pool.value_dim] if pool.values is None else _taken(pool.values, call)
        out = mx.fast.scaled_dot_product_attention(
            own, keys, values, scale=scale, mask=call.mask, sinks=sinks
        )
        found.append(out.transpose(0, 2, 1, 3).reshape(-1, q.shape[1] * pool.value_dim))
    whole = found[0] if len(found) == 1 else mx.concatenate(found, axis=0)
    return whole if batch.order is None else whole[batch.order]


def _taken(pool: mx.array, call: AttentionCall) -> mx.array:
    """Return keys or values [sequences, kv_heads, positions, dim]."""
    if call.run is not None:
        return pool[None, :, call.run]
    assert call.slots is not None, "a call has one or the other"
    heads, _, dim = pool.shape
    found = mx.take(pool, call.slots, axis=1).reshape(heads, call.num_sequences, -1, dim)
    return found.transpose(1, 0, 2, 3)


def _chunk(rows: npt.NDArray[np.int64], slots: Slots, mask: mx.array | str) -> AttentionCall:
    run = _run_of(slots)
    return AttentionCall(mx.array(rows), 1, run, None if run else mx.array(slots), mask)


def _decode(rows: npt.NDArray[np.int64], each: Sequence[Slots]) -> AttentionCall:
    run = _run_of(each[0]) if len(each) == 1 else None
    if run:
        return AttentionCall(mx.array(rows), 1, run, None, None)
    longest = len(each[0])
    padded = np.stack([np.pad(slots, (0, longest - len(slots)), mode="edge") for slots in each])
    mask = None
    if any(len(slots) < longest for slots in each):
        lengths = np.array([len(slots) for slots in each])
        mask = mx.array((np.arange(longest) < lengths[:, None])[:, None, None])
    return AttentionCall(mx.array(rows), len(each), None, mx.array(padded.reshape(-1)), mask)


def _run_of(slots: Slots) -> slice | None:
    """Return the slice of neighbouring places, or None where they are apart."""
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 != len(slots) or (np.diff(slots) != 1).any():
        return None
    return slice(first, last + 1)


def _mask(row: Row, first: int, window: int | None) -> mx.array | str:
    end = row.start + row.num_tokens
    if window is None or end <= window:
        return "causal"
    queries, keys = np.arange(row.start, end)[:, None], np.arange(first, end)[None]
    return mx.array((keys <= queries) & (keys > queries - window))[None, None]
