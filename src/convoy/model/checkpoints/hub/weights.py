"""Single tensors of a model on a hub, without its shards: headers say where each lies, ranges fetch it.

A member gets the bytes of its own layers alone, also where the whole model is one file, and each tensor is
compared with a manifest that neither the hub nor the network made. A tensor that broke off is gone on with.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import HubUnreachable, ModelError
from convoy.model.checkpoints.checkpoint import (
    INDEX,
    MAX_INDEX_BYTES,
    SINGLE,
    StoredTensor,
    header_bytes,
    parse_header,
    parse_index,
)
from convoy.model.checkpoints.hub.stream import HubCommit, Watch
from convoy.model.checkpoints.store.parts import ModelPart, PartFile

_TRIES = 3  # in a row without a byte: a member has somebody else to ask


@dataclass(frozen=True, slots=True)
class _Run:
    """Parts that lie one behind the other in a file, from byte ``offset`` on."""

    file: str
    offset: int
    parts: list[ModelPart]


class HubWeights:
    """The safetensors of one commit. What was learnt of them is kept; any thread may ask."""

    def __init__(self, commit: HubCommit) -> None:
        self.commit = commit
        self._lock = threading.Lock()
        self._shards: dict[str, str] | None = None  # of each tensor; None: not asked yet
        self._is_single = False
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    def find(self, names: Collection[str], watch: Watch = lambda: None) -> dict[str, StoredTensor]:
        """Those of ``names`` that the commit has, with the file of each for its path.

        The first question is asked once: where the hub cannot be reached that is known after seconds. Raises
        HubUnreachable, and ModelError for a commit or an index that is not there or makes no sense. What
        ``watch`` raises while a try is waited for ends it.
        """
        with self._lock:
            files = {self._file_of(name) for name in names} - {""}
            for file in sorted(files - self._headers.keys()):
                self._headers[file] = self._header(file, watch)
            known = {name: self._headers.get(self._file_of(name), {}).get(name) for name in names}
        return {name: stored for name, stored in known.items() if stored is not None}

    def fetch(
        self, parts: Sequence[ModelPart], tell: Callable[[int, int], None], watch: Watch
    ) -> list[ModelPart]:
        """Get ``parts``, which are tensors; returns those that the hub has not, or not with these bytes.

        ``tell`` hears of bytes that came, and of how many; ``watch`` is called while an earlier try is
        hashed. What they raise ends this, and so does HubUnreachable; what came stays.
        """
        watch()
        places = self.find([part.name for part in parts], watch)
        wrong = [part for part in parts if not _fits(part, places.get(part.name))]
        wanted = [part for part in parts if _fits(part, places.get(part.name))]
        total, done = sum(part.num_bytes for part in wanted), 0

        def count(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            tell(done, total)

        for run in _runs(wanted, places):
            wrong += self._fetch_run(run, count, watch)
        return wrong

    def stream(self, name: str, start: int, num_bytes: int) -> Iterator[bytes]:
        """Bytes of one tensor from ``start`` on, as they come, from whoever has them. Raises as `find`."""
        stored = self.find([name]).get(name)
        if stored is None:
            raise ModelError(f"{self.commit} has no tensor {name}")
        at = stored.offset + start
        return self.commit.stream(stored.path.name, at, at + num_bytes, tries=2)

    def _fetch_run(self, run: _Run, count: Callable[[int], None], watch: Watch) -> list[ModelPart]:
        """One question for all of it; what an earlier try left is of its first part."""
        first = PartFile(run.parts[0], lambda _num_bytes: watch())
        with first:
            resumed = first.resumed
            count(resumed)
            left = first.left + sum(part.num_bytes for part in run.parts[1:])
            start = run.offset + resumed
            chunks = self.commit.stream(run.file, start, start + left, tries=_TRIES, watch=watch)
            wrong = _fill(first, run.parts[1:], chunks, count)
        if resumed and first.part in wrong:  # perhaps the earlier try's half was: now it is gone
            wrong.remove(first.part)
            count(-first.part.num_bytes)
            wrong += self._fetch_run(_Run(run.file, run.offset, [first.part]), count, watch)
        return wrong

    def _file_of(self, name: str) -> str:
        """The shard of a tensor; empty where there is none."""
        if self._shards is None and not self._is_single:
            self._look_up()
        return SINGLE if self._is_single else (self._shards or {}).get(name, "")

    def _look_up(self) -> None:
        try:
            data = self.commit.read(INDEX, 0, MAX_INDEX_BYTES, tries=1)
        except HubUnreachable:
            raise
        except ModelError:  # a model of one file has no index; where that is not there either, it says so
            self._is_single = True
            return
        self._shards = parse_index(f"{INDEX} of {self.commit}", data)

    def _header(self, file: str, watch: Watch) -> dict[str, StoredTensor]:
        place = f"{file} of {self.commit}"
        length = header_bytes(place, self.commit.read(file, 0, 8, watch=watch))
        raw = self.commit.read(file, 8, 8 + length, watch=watch)
        if len(raw) < length:
            raise ModelError(f"{place} is truncated: {len(raw)} of {length} bytes of its header came")
        return {tensor.name: tensor for tensor in parse_header(Path(file), raw)}


def _fits(part: ModelPart, stored: StoredTensor | None) -> bool:
    """Whether it may be that tensor: its digest, which covers dtype and shape, is still to be compared."""
    return stored is not None and stored.num_bytes == part.num_bytes


def _runs(parts: Sequence[ModelPart], places: dict[str, StoredTensor]) -> Iterator[_Run]:
    run: _Run | None = None
    end = 0
    for part in sorted(parts, key=lambda part: (str(places[part.name].path), places[part.name].offset)):
        stored = places[part.name]
        begun = part.place.with_name(f"{part.place.name}.part").exists()
        if run is not None and (run.file, end) == (stored.path.name, stored.offset) and not begun:
            run.parts.append(part)
        else:
            if run is not None:
                yield run
            run = _Run(stored.path.name, stored.offset, [part])
        end = stored.offset + part.num_bytes
    if run is not None:
        yield run


def _fill(
    first: PartFile, others: Sequence[ModelPart], chunks: Iterator[bytes], count: Callable[[int], None]
) -> list[ModelPart]:
    """Share ``chunks`` out, in order; returns the parts that came to something else."""
    held = HeldTensors(chunks, count)
    wrong = [] if _fill_one(first, held) else [first.part]
    for part in others:
        with PartFile(part) as file:
            file.begin_anew()
            if not _fill_one(file, held):
                wrong.append(part)
    return wrong


class HeldTensors:
    """Chunks of any size, taken in other sizes."""

    def __init__(
        self, chunks: Iterator[bytes], count: Callable[[int], None] = lambda _num_bytes: None
    ) -> None:
        self._chunks = chunks
        self._count = count
        self._left = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """Up to ``most`` bytes; none at the end."""
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        taken, self._left = self._left[:most], self._left[most:]
        self._count(len(taken))
        return taken


def _fill_one(file: PartFile, held: HeldTensors) -> bool:
    while file.left:
        taken = held.take(file.left)
        if not taken:
            break
        file.write(taken)
    return file.finish()
