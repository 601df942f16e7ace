"""A session's K/V between its file and the pools of the stages, a slice at a time, between steps."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from convoy.engine.engine import Engine
from convoy.engine.executor import Executor, Kv
from convoy.engine.scheduler import Scheduled, Scheduler
from convoy.engine.sequence import Sequence, SequenceState
from convoy.engine.session_file import SessionReader, SessionWriter
from convoy.engine.session_format import Progress, SavedSession, SavedState, SessionModel, encode_start
from convoy.errors import StageLost, StepLate, Unavailable

_SLICE_BYTES = 16 * 1024 * 1024  # while it is carried, no step runs
_SLICE_BLOCKS = 1024
_MAX_TRIES = 16


@dataclass(frozen=True, slots=True)
class _Slice:
    """Blocks [start, end) of a session, and the tags of their prefixes."""

    start: int
    end: int
    tags: SequenceOf[bytes]


class SessionBlocks:
    """Saves and loads for one session. Called from its thread; the engine's does the carrying."""

    def __init__(self, engine: Engine, model: SessionModel) -> None:
        self._engine = engine
        self._model = model

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
        size: int = self._engine.between_steps(
            lambda _executor, scheduler, _lock: scheduler.limits.block_size
        )
        num_blocks = len(state.tokens) // size if self._model.keeps_kv else 0
        state = replace(state, positions=num_blocks * size)
        start = encode_start(self._model, state)
        total = len(start) + state.positions * self._model.position_bytes * self._model.num_layers
        digest, done = hashlib.sha256(), 0
        with SessionWriter(path, key) as file:
            for part in [start, *([] if not num_blocks else self._layers(num_blocks, size, resident))]:
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

        Returns for how many positions.
        """
        with SessionReader(path, key) as reader:
            saved = SavedSession(reader, self._model, progress)
            adopt(saved.state)
            if not saved.state.positions or not saved.same_kernel:
                return 0
            return self._fill(saved, salt, progress)

    def _layers(self, num_blocks: int, size: int, resident: Callable[[], Sequence]) -> Iterator[bytes]:
        """K, then V, of each layer."""
        block_bytes = size * self._model.position_bytes
        num_layers = max(1, _SLICE_BYTES // (num_blocks * block_bytes))
        at_once = min(_SLICE_BLOCKS, max(1, _SLICE_BYTES // (num_layers * block_bytes)))
        for first in range(0, self._model.num_layers, num_layers):
            last = min(first + num_layers, self._model.num_layers)
            slices = [
                self._read(first, last, (start, min(start + at_once, num_blocks)), resident)
                for start in range(0, num_blocks, at_once)
            ]
            for layer in range(last - first):
                for half in range(2):
                    yield b"".join(one[layer, half].astype("<f4", copy=False).tobytes() for one in slices)

    def _read(self, first: int, last: int, blocks: tuple[int, int], resident: Callable[[], Sequence]) -> Kv:
        for _ in range(_MAX_TRIES):
            sequence = resident()

            def read(
                executor: Executor,
                _scheduler: Scheduler,
                lock: threading.Condition,
                sequence: Sequence = sequence,
            ) -> Kv | None:
                with lock:
                    if sequence.state is not SequenceState.IDLE:
                        return None
                    wanted = sequence.blocks[slice(*blocks)]
                return executor.read_blocks(first, last, wanted)

            try:
                found: Kv | None = self._engine.between_steps(read)
            except StageLost:
                continue  # `resident` runs its tokens on other stages, or says that there are none
            if found is not None:
                return found
        raise Unavailable(
            f"the session's K/V was taken {_MAX_TRIES} times while it was saved",
            hint="try again when fewer requests run, or give the members more memory",
        )

    def _fill(self, saved: SavedSession, salt: bytes, progress: Progress) -> int:
        tokens = saved.state.tokens

        def plan(
            _executor: Executor, scheduler: Scheduler, lock: threading.Condition
        ) -> tuple[int, list[bytes]]:
            with lock:
                size, free = scheduler.limits.block_size, scheduler.pool.num_free
                # The last token has to run whatever is there, and nobody finds blocks where none are shared.
                usable = min(saved.state.positions, len(tokens) - 1) // size
                usable = min(usable, free) if scheduler.limits.prefix_cache else 0
                return size, scheduler.tags_of(tokens, salt, usable)

        planned: tuple[int, list[bytes]] = self._engine.between_steps(plan)
        size, tags = planned
        model = self._model
        at_once = _SLICE_BYTES // (size * model.position_bytes * model.num_layers)
        at_once = min(_SLICE_BLOCKS, max(1, at_once))
        # From the end: blocks that nobody owns are evicted oldest first, and the beginning is of most use.
        for start in reversed(range(0, len(tags), at_once)):
            one = _Slice(start, min(start + at_once, len(tags)), tags[start : start + at_once])
            layers = [
                np.stack(saved.read(layer, one.start * size, one.end * size))
                for layer in range(model.num_layers)
            ]
            kv = np.stack(layers).astype(np.float32, copy=False)
            try:
                self._engine.between_steps(partial(_write, one, kv))
            except StageLost:
                return 0  # other stages know nothing of it: the tokens are run there
            progress((len(tags) - start) * size, len(tags) * size)
        return len(tags) * size


def _write(one: _Slice, kv: Kv, executor: Executor, scheduler: Scheduler, lock: threading.Condition) -> None:
    with lock:
        pool = scheduler.pool
        if pool.num_free < one.end - one.start:
            return  # who runs comes first, and what is missing is run
        blocks = pool.allocate(one.end - one.start)
        # Blocks that were given back a moment ago still stand in a table there: the releases go first.
        probe = scheduler.probe()
    try:
        _pass(executor, probe)
        executor.write_blocks(blocks, one.tags, kv)
    except BaseException:
        with lock:
            pool.free(blocks)
        raise
    with lock:
        for block, tag in zip(blocks, one.tags, strict=True):
            pool.label(block, tag)
        pool.free(blocks)


def _pass(executor: Executor, probe: Scheduled) -> None:
    try:
        executor.submit(probe.step, ())
        executor.collect()
    except StepLate as error:  # nobody will come back for it
        raise StageLost(error.message, hint=error.hint) from error
