"""A session's K/V between its file and the pools of the stages: one slice at a time, between steps.

No step runs while a slice is carried. So a slice takes about half a second, and has at most 16 MiB. Waiting
steps run between slices. If none waits, an empty step passes every stage now and then, as in an idle engine.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convoy.engine.active import Between
from convoy.engine.engine import Engine
from convoy.engine.run.executor import Executor, Kv
from convoy.engine.scheduler import Scheduled, Scheduler
from convoy.engine.sequence import Sequence, SequenceState
from convoy.engine.sessions.file import SessionReader, SessionWriter
from convoy.engine.sessions.format import Progress, SavedSession, SavedState, SessionModel, encode_start
from convoy.engine.sessions.slice_size import SliceSize
from convoy.errors import StageLost, StepLate, Unavailable

# The most blocks that one message names.
_MAX_BLOCKS = 1024
_MAX_TRIES = 16


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """Hold the limits of carrying K/V between a session's file and the stages."""

    # Of a slice.
    max_bytes: int = 16 * 1024 * 1024
    # Of V, while the K of the same layer is written before it.
    held_bytes: int = 64 * 1024 * 1024
    # How often an empty step passes meanwhile.
    pass_every_s: float = 5.0


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """Hold blocks [start, end) of a session, and the tags of their prefixes."""

    start: int
    end: int
    tags: SequenceOf[bytes]


class SessionBlocks:
    """Save or load the K/V of one session, once.

    The session's thread calls it, and the engine's thread carries the slices. Both methods raise
    `Unavailable` if a slice has not begun within ``timeout_s``.
    """

    def __init__(
        self,
        engine: Engine,
        model: SessionModel,
        timeout_s: float | None = None,
        *,
        limits: CarryLimits | None = None,
    ) -> None:
        self._limits = limits = limits or CarryLimits()
        self._engine = engine
        self._timeout_s = timeout_s
        self._model = model
        self._slice_size = SliceSize(limits.max_bytes)
        self._passed_s = time.monotonic()

    def save(
        self,
        path: Path,
        key: bytes | None,
        state: SavedState,
        *,
        resident: Callable[[], Sequence],
        progress: Progress,
    ) -> None:
        """Write the session to ``path``.

        ``resident`` returns the sequence that holds all of the session's K/V, and runs it again if its blocks
        were taken.
        """
        size: int = self._between_steps(lambda _executor, scheduler, _lock: scheduler.limits.block_size)
        num_blocks = len(state.tokens) // size if self._model.keeps_kv else 0
        state = replace(state, positions=num_blocks * size)
        start = encode_start(self._model, state)
        total = len(start) + state.positions * self._model.position_bytes * self._model.num_layers
        digest, done = hashlib.sha256(), 0
        with SessionWriter(path, key) as file:
            for part in itertools.chain([start], self._layers(num_blocks, size, resident)):
                file.write(part)
                digest.update(part)
                done += len(part)
                progress(done, total)
            file.write(digest.digest())

    def load(
        self,
        path: Path,
        key: bytes | None,
        *,
        salt: bytes,
        adopt: Callable[[SavedState], None],
        progress: Progress,
    ) -> int:
        """Check the file, pass its state to ``adopt``, then fill the stages' pools under ``salt``.

        Return the number of positions filled. The file is read twice; each reading is one half of
        ``progress``.
        """
        with SessionReader(path, key) as reader:
            size = reader.size
            saved = SavedSession(reader, self._model, lambda done, total: progress(done, 2 * total))
            adopt(saved.state)
            found = 0
            if saved.state.positions and saved.same_kv:
                found = self._fill(
                    saved, salt, lambda done, total: progress(size + size * done // total, 2 * size)
                )
            progress(2 * size, 2 * size)
            return found

    # From the stages.

    def _layers(self, num_blocks: int, size: int, resident: Callable[[], Sequence]) -> Iterator[bytes]:
        """Yield K, then V, of each layer."""
        layer_bytes = num_blocks * size * self._model.position_bytes
        layer = 0
        while num_blocks and layer < self._model.num_layers:
            at_once = self._slice_size.num_bytes // layer_bytes if num_blocks <= _MAX_BLOCKS else 0
            end = min(layer + max(1, at_once), self._model.num_layers)
            if at_once:
                for halves in self._read(layer, end, 0, num_blocks, resident):
                    yield from map(_encode, halves)
            else:
                yield from self._long_layer(layer, num_blocks, size, resident)
            layer = end

    def _long_layer(
        self, layer: int, num_blocks: int, size: int, resident: Callable[[], Sequence]
    ) -> Iterator[bytes]:
        """Yield K, then V, of a layer that does not fit a slice.

        Its V is kept meanwhile, or read a second time if it is too large to keep.
        """
        block_bytes = size * self._model.position_bytes
        kept: list[bytes] = []
        keeps = num_blocks * block_bytes // 2 <= self._limits.held_bytes
        for half in (0, 1):
            start = num_blocks if half and keeps else 0
            while start < num_blocks:
                at_once = min(_MAX_BLOCKS, max(1, self._slice_size.num_bytes // block_bytes))
                end = min(start + at_once, num_blocks)
                found = self._read(layer, layer + 1, start, end, resident)[0]
                yield _encode(found[half])
                if keeps:
                    kept.append(_encode(found[1]))
                start = end
        yield from kept

    def _read(self, first: int, last: int, start: int, end: int, resident: Callable[[], Sequence]) -> Kv:
        """Return blocks [start, end) of the session in layers [first, last)."""
        for _ in range(_MAX_TRIES):
            work = partial(self._read_idle, resident(), (first, last), slice(start, end))
            self._let_pass()
            try:
                found: Kv | None = self._between_steps(work)
            except StageLost:
                # `resident` runs its tokens on other stages, or raises if there are none.
                continue
            if found is not None:
                return found
        raise Unavailable(
            f"the session's K/V was taken {_MAX_TRIES} times while it was saved",
            hint="try again when fewer requests run, or give the members more memory",
        )

    def _read_idle(
        self,
        sequence: Sequence,
        layers: tuple[int, int],
        part: slice,
        executor: Executor,
        _scheduler: Scheduler,
        lock: threading.Condition,
    ) -> Kv | None:
        """Return the blocks' K/V, or None if they were taken."""
        with lock:
            if sequence.state is not SequenceState.IDLE:
                return None
            blocks = sequence.tables[0][part]
        with self._slice_size.measure():
            return executor.read_blocks(*layers, blocks)

    # To the stages.

    def _fill(self, saved: SavedSession, salt: bytes, progress: Progress) -> int:
        """Fill the pools and return the number of leading positions that have K/V now."""
        size, tags = self._plan_fill(saved, salt)
        model = self._model
        block_bytes = size * model.position_bytes * model.num_layers
        end = found = len(tags)
        # From the end, because unowned blocks are evicted oldest first, and the beginning is the most useful.
        while end:
            start = max(0, end - min(_MAX_BLOCKS, max(1, self._slice_size.num_bytes // block_bytes)))
            layers = self._parts(saved, start * size, end * size)
            # The first, and usually only, part is read here and not on the engine's thread.
            layers = itertools.chain([next(layers)], layers)
            self._let_pass()
            try:
                if not self._between_steps(
                    partial(self.write_slice, BlockSlice(start, end, tags[start:end]), layers)
                ):
                    found = start
            except StageLost:
                # The new stages have none of the blocks: the next call runs the tokens there.
                return 0
            end = start
            progress(len(tags) - end, len(tags))
        return found * size

    def _plan_fill(self, saved: SavedSession, salt: bytes) -> tuple[int, list[bytes]]:
        """Return the size of a block, and the tags of the blocks that are useful and fit."""
        tokens = saved.state.tokens

        def plan(
            _executor: Executor, scheduler: Scheduler, lock: threading.Condition
        ) -> tuple[int, list[bytes]]:
            with lock:
                size, free = scheduler.limits.block_size, scheduler.pools.first.num_free
                # The last token must run in any case, and no lookup finds blocks where prefixes are not
                # shared.
                usable = min(saved.state.positions, len(tokens) - 1) // size
                usable = min(usable, free) if scheduler.limits.shares_prefixes else 0
                return size, scheduler.tags_of(tokens, salt, usable)

        planned: tuple[int, list[bytes]] = self._between_steps(plan)
        return planned

    def _parts(self, saved: SavedSession, start: int, end: int) -> Iterator[tuple[int, Kv]]:
        """Yield the first layer and the K/V of each part, for positions [start, end).

        A part has as many layers as a slice may hold.
        """
        num_layers = self._model.num_layers
        at_once = max(1, self._limits.max_bytes // ((end - start) * self._model.position_bytes))
        for first in range(0, num_layers, at_once):
            layers = range(first, min(first + at_once, num_layers))
            halves = [np.stack(saved.read(layer, start, end)) for layer in layers]
            yield first, np.stack(halves).astype(np.float32, copy=False)

    def write_slice(
        self,
        one: BlockSlice,
        layers: Iterable[tuple[int, Kv]],
        executor: Executor,
        scheduler: Scheduler,
        lock: threading.Condition,
    ) -> bool:
        """Write one slice; return False if there is no room any more.

        Running requests come first: missing positions are run again later.
        """
        with lock:
            pool = scheduler.pools.first
            if pool.num_free < one.end - one.start:
                return False
            blocks = pool.allocate(one.end - one.start)
            # The stages may still list blocks in a table that was released a moment ago, so the releases go
            # first.
            probe = scheduler.probe()
        try:
            _pass(executor, probe)
            with self._slice_size.measure():
                for first, kv in layers:
                    executor.write_blocks(first, blocks, one.tags, kv)
        except BaseException:
            with lock:
                pool.free(blocks)
            raise
        with lock:
            # Only complete blocks become findable: a failed write frees them without a label.
            for block, tag in zip(blocks, one.tags, strict=True):
                pool.label(block, tag)
            pool.free(blocks)
        return True

    def _between_steps(self, work: Between) -> Any:
        return self._engine.between_steps(work, self._timeout_s)

    def _let_pass(self) -> None:
        """Let an empty step pass now and then: an engine that only carries slices would seem to hang."""
        if time.monotonic() - self._passed_s >= self._limits.pass_every_s:
            self._engine.wake()
            self._passed_s = time.monotonic()


def _encode(half: Kv) -> bytes:
    return half.astype("<f4", copy=False).tobytes()


def _pass(executor: Executor, probe: Scheduled) -> None:
    try:
        executor.submit(probe.step, ())
        executor.collect()
    # No later call collects this step, so it counts as lost.
    except StepLate as error:
        raise StageLost(error.message, hint=error.hint) from error
