"""A session's K/V between its file and the pools of the stages: a slice at a time, between steps.

While a slice is carried no step runs, so a slice is what takes about half a second, and at most 16 MiB. Steps
that wait go in between; where none does, an empty one passes every stage now and then, as in an idle engine.
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

_MAX_BYTES = 16 * 1024 * 1024  # of a slice
_MAX_BLOCKS = 1024  # as many as one message names
_HELD_BYTES = 64 * 1024 * 1024  # of V, while the K of the same layer is written before it
_PASS_EVERY_S = 5.0
_MAX_TRIES = 16


@dataclass(frozen=True, slots=True)
class _Slice:
    """Blocks [start, end) of a session, and the tags of their prefixes."""

    start: int
    end: int
    tags: SequenceOf[bytes]


class SessionBlocks:
    """Saves or loads, once, for one session. Called from its thread; the engine's does the carrying.

    Both raise `Unavailable` where a slice is not begun within ``timeout_s``.
    """

    def __init__(self, engine: Engine, model: SessionModel, timeout_s: float | None = None) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._model = model
        self._pace = SliceSize(_MAX_BYTES)
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
        """``resident`` gives the sequence that holds all of the session's K/V, running it if need be."""
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
        """Hands out what was saved once it is found right, then fills the stages' pools under ``salt``.

        Returns for how many positions. Each half of ``progress`` is one reading of the file.
        """
        with SessionReader(path, key) as reader:
            size = reader.size
            saved = SavedSession(reader, self._model, lambda done, total: progress(done, 2 * total))
            adopt(saved.state)
            found = 0
            if saved.state.positions and saved.same_kernel:
                found = self._fill(
                    saved, salt, lambda done, total: progress(size + size * done // total, 2 * size)
                )
            progress(2 * size, 2 * size)
            return found

    # From the stages.

    def _layers(self, num_blocks: int, size: int, resident: Callable[[], Sequence]) -> Iterator[bytes]:
        """K, then V, of each layer."""
        layer_bytes = num_blocks * size * self._model.position_bytes
        layer = 0
        while num_blocks and layer < self._model.num_layers:
            at_once = self._pace.num_bytes // layer_bytes if num_blocks <= _MAX_BLOCKS else 0
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
        """One that is no slice. Its V is kept meanwhile, or read again where that would be too much."""
        block_bytes = size * self._model.position_bytes
        kept: list[bytes] = []
        keeps = num_blocks * block_bytes // 2 <= _HELD_BYTES
        for half in (0, 1):
            start = num_blocks if half and keeps else 0
            while start < num_blocks:
                at_once = min(_MAX_BLOCKS, max(1, self._pace.num_bytes // block_bytes))
                end = min(start + at_once, num_blocks)
                found = self._read(layer, layer + 1, start, end, resident)[0]
                yield _encode(found[half])
                if keeps:
                    kept.append(_encode(found[1]))
                start = end
        yield from kept

    def _read(self, first: int, last: int, start: int, end: int, resident: Callable[[], Sequence]) -> Kv:
        """Blocks [start, end) of the session in layers [first, last)."""
        for _ in range(_MAX_TRIES):
            work = partial(self._read_idle, resident(), (first, last), slice(start, end))
            self._let_pass()
            try:
                found: Kv | None = self._between_steps(work)
            except StageLost:
                continue  # `resident` runs its tokens on other stages, or says that there are none
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
        """None if its blocks were taken."""
        with lock:
            if sequence.state is not SequenceState.IDLE:
                return None
            blocks = sequence.tables[0][part]
        with self._pace.measure():
            return executor.read_blocks(*layers, blocks)

    # To the stages.

    def _fill(self, saved: SavedSession, salt: bytes, progress: Progress) -> int:
        """Returns for how many positions from the start K/V is there now."""
        size, tags = self._plan_fill(saved, salt)
        model = self._model
        block_bytes = size * model.position_bytes * model.num_layers
        end = found = len(tags)
        # From the end: blocks that nobody owns are evicted oldest first, and the beginning is of most use.
        while end:
            start = max(0, end - min(_MAX_BLOCKS, max(1, self._pace.num_bytes // block_bytes)))
            layers = self._parts(saved, start * size, end * size)
            # The first, and mostly only, part is read here and not on the engine's thread.
            layers = itertools.chain([next(layers)], layers)
            self._let_pass()
            try:
                if not self._between_steps(partial(self._write, _Slice(start, end, tags[start:end]), layers)):
                    found = start
            except StageLost:
                return 0  # other stages know nothing of it: the tokens are run there
            end = start
            progress(len(tags) - end, len(tags))
        return found * size

    def _plan_fill(self, saved: SavedSession, salt: bytes) -> tuple[int, list[bytes]]:
        """The size of a block, and the tags of those that there is use and room for."""
        tokens = saved.state.tokens

        def plan(
            _executor: Executor, scheduler: Scheduler, lock: threading.Condition
        ) -> tuple[int, list[bytes]]:
            with lock:
                size, free = scheduler.limits.block_size, scheduler.pools.first.num_free
                # The last token has to run whatever is there, and nobody finds blocks where none are shared.
                usable = min(saved.state.positions, len(tokens) - 1) // size
                usable = min(usable, free) if scheduler.limits.shares_prefixes else 0
                return size, scheduler.tags_of(tokens, salt, usable)

        planned: tuple[int, list[bytes]] = self._between_steps(plan)
        return planned

    def _parts(self, saved: SavedSession, start: int, end: int) -> Iterator[tuple[int, Kv]]:
        """Positions [start, end) of all layers, as many at once as a slice may have, and their first."""
        num_layers = self._model.num_layers
        at_once = max(1, _MAX_BYTES // ((end - start) * self._model.position_bytes))
        for first in range(0, num_layers, at_once):
            layers = range(first, min(first + at_once, num_layers))
            halves = [np.stack(saved.read(layer, start, end)) for layer in layers]
            yield first, np.stack(halves).astype(np.float32, copy=False)

    def _write(
        self,
        one: _Slice,
        layers: Iterable[tuple[int, Kv]],
        executor: Executor,
        scheduler: Scheduler,
        lock: threading.Condition,
    ) -> bool:
        """False where there is no room any more: who runs comes first, and what is missing is run."""
        with lock:
            pool = scheduler.pools.first
            if pool.num_free < one.end - one.start:
                return False
            blocks = pool.allocate(one.end - one.start)
            # Blocks that were given back a moment ago still stand in a table there: the releases go first.
            probe = scheduler.probe()
        try:
            _pass(executor, probe)
            with self._pace.measure():
                for first, kv in layers:
                    executor.write_blocks(first, blocks, one.tags, kv)
        except BaseException:
            with lock:
                pool.free(blocks)
            raise
        with lock:
            for block, tag in zip(blocks, one.tags, strict=True):
                pool.label(block, tag)
            pool.free(blocks)
        return True

    def _between_steps(self, work: Between) -> Any:
        return self._engine.between_steps(work, self._timeout_s)

    def _let_pass(self) -> None:
        """An engine that always has a slice to carry would come to no step, and seem to stand still."""
        if time.monotonic() - self._passed_s >= _PASS_EVERY_S:
            self._engine.wake()
            self._passed_s = time.monotonic()


def _encode(half: Kv) -> bytes:
    return half.astype("<f4", copy=False).tobytes()


def _pass(executor: Executor, probe: Scheduled) -> None:
    try:
        executor.submit(probe.step, ())
        executor.collect()
    except StepLate as error:  # nobody will come back for it
        raise StageLost(error.message, hint=error.hint) from error
