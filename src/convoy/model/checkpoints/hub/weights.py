"""Fetch single tensors of a model on a hub: headers give their places, and ranges fetch the bytes.

A member gets the bytes of its own layers alone, even if the whole model is one file. Each tensor is compared
with a manifest that comes neither from the hub nor from the network. An interrupted tensor is resumed.
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
from convoy.model.checkpoints.formats.gguf.model import config_bytes
from convoy.model.checkpoints.hub.gguf import FIRST_BYTES, GgufPlaces
from convoy.model.checkpoints.hub.stream import HubCommit, Watch
from convoy.model.checkpoints.source import HEADER
from convoy.model.checkpoints.store.parts import ModelPart, PartFile

# attempts in a row without a byte; few, because a member can ask its peers instead
_TRIES = 3


@dataclass(frozen=True, slots=True)
class _Run:
    """Hold parts that lie one behind the other in a file, from byte ``offset`` on."""

    file: str
    offset: int
    parts: list[ModelPart]


class _ShardPlaces:
    """Find the tensors of a commit's safetensors files. The index and headers read are kept."""

    def __init__(self, commit: HubCommit) -> None:
        self.commit = commit
        # the shard of each tensor; None until the index is read
        self._shards: dict[str, str] | None = None
        self._is_single = False
        self._headers: dict[str, dict[str, StoredTensor]] = {}

    def find(self, names: Collection[str], watch: Watch = lambda: None) -> dict[str, StoredTensor]:
        """Return those of ``names`` that the files have.

        The index is asked for once, without retries, so an unreachable hub is reported within seconds.
        """
        files = {self._file_of(name) for name in names} - {""}
        for file in sorted(files - self._headers.keys()):
            self._headers[file] = self._header(file, watch)
        known = {name: self._headers.get(self._file_of(name), {}).get(name) for name in names}
        return {name: stored for name, stored in known.items() if stored is not None}

    def _file_of(self, name: str) -> str:
        """Return the shard of a tensor, or "" if there is none."""
        if self._shards is None and not self._is_single:
            self._look_up()
        return SINGLE if self._is_single else (self._shards or {}).get(name, "")

    def _look_up(self) -> None:
        try:
            data = self.commit.read(INDEX, 0, MAX_INDEX_BYTES, tries=1)
        except HubUnreachable:
            raise
        # a model of one file has no index; if that file is missing too, reading its header reports it
        except ModelError:
            self._is_single = True
            return
        self._shards = parse_index(f"{INDEX} of {self.commit}", data)

    def _header(self, file: str, watch: Watch) -> dict[str, StoredTensor]:
        place = f"{file} of {self.commit}"
        length = header_bytes(place, self.commit.read(file, 0, 8, watch=watch))
        raw = self.commit.read(file, 8, 8 + length, watch=watch)
        if len(raw) < length:
            raise ModelError(
                f"{place} is truncated: {len(raw)} of {length} bytes of its header came",
                hint="try again: the download did not end",
            )
        return {tensor.name: tensor for tensor in parse_header(Path(file), raw)}


class HubWeights:
    """Fetch tensors of one commit: of its safetensors files, or of one GGUF model. Thread-safe."""

    def __init__(self, commit: HubCommit, gguf: str = "", *, first_bytes: int = FIRST_BYTES) -> None:
        """Take the name of one of a model's files for a GGUF model, whose header may be longer than the
        ``first_bytes`` that are asked for.
        """
        self.commit = commit
        self._lock = threading.Lock()
        self._gguf = GgufPlaces(commit, gguf, first_bytes) if gguf else None
        self._places = _ShardPlaces(commit) if self._gguf is None else self._gguf

    @property
    def name(self) -> str:
        """Return ``org/name@commit``, with ``:FILE`` for a GGUF model."""
        place = f"{self.commit.repo}@{self.commit.commit}"
        return place if self._gguf is None else f"{place}:{self._gguf.file}"

    def find(self, names: Collection[str], watch: Watch = lambda: None) -> dict[str, StoredTensor]:
        """Return those of ``names`` that the commit has; each tensor's path is its file's name.

        Raises HubUnreachable. Raises ModelError if the commit, an index or a header does not exist or is
        malformed. Exceptions of ``watch``, which is called between attempts, end the call.
        """
        with self._lock:
            return self._places.find(names, watch)

    def stream_file(self, part: ModelPart) -> Iterator[bytes]:
        """Yield the bytes of a file beside the weights. A GGUF model has its own in its header."""
        if self._gguf is not None and part.name == HEADER:
            return self.commit.stream(self._gguf.model().path.as_posix(), 0, part.num_bytes)
        if self._gguf is not None and part.name == "config.json":
            return iter([config_bytes(self._gguf.model().config)[: part.num_bytes]])
        return self.commit.stream(part.name, 0, part.num_bytes)

    def fetch(
        self, parts: Sequence[ModelPart], tell: Callable[[int, int], None], watch: Watch
    ) -> list[ModelPart]:
        """Fetch ``parts``, which are tensors; return those that the hub lacks or has with other bytes.

        ``tell`` is called with (received, total) bytes. ``watch`` is called while bytes of an earlier attempt
        are hashed. Exceptions of either, and HubUnreachable, end the call; received bytes are kept.
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
        """Yield ``num_bytes`` of one tensor from byte ``start`` on, as they arrive. Raises as `find` does."""
        stored = self.find([name]).get(name)
        if stored is None:
            raise ModelError(f"{self.commit} has no tensor {name}")
        at = stored.offset + start
        return self.commit.stream(stored.path.as_posix(), at, at + num_bytes, tries=2)

    def _fetch_run(self, run: _Run, count: Callable[[int], None], watch: Watch) -> list[ModelPart]:
        """Fetch a run with one request; return the parts that came with wrong bytes.

        Bytes of an earlier attempt can belong to the run's first part only.
        """
        first = PartFile(run.parts[0], lambda _num_bytes: watch())
        with first:
            resumed = first.resumed
            count(resumed)
            left = first.left + sum(part.num_bytes for part in run.parts[1:])
            start = run.offset + resumed
            chunks = self.commit.stream(run.file, start, start + left, tries=_TRIES, watch=watch)
            wrong = _fill(first, run.parts[1:], chunks, count)
        # the earlier attempt's bytes may be at fault; they are removed now, so fetch the part once more
        if resumed and first.part in wrong:
            wrong.remove(first.part)
            count(-first.part.num_bytes)
            wrong += self._fetch_run(_Run(run.file, run.offset, [first.part]), count, watch)
        return wrong


def _fits(part: ModelPart, stored: StoredTensor | None) -> bool:
    """Tell whether sizes agree. The digest, which covers dtype and shape, is compared after the fetch."""
    return stored is not None and stored.num_bytes == part.num_bytes


def _runs(parts: Sequence[ModelPart], places: dict[str, StoredTensor]) -> Iterator[_Run]:
    run: _Run | None = None
    end = 0
    for part in sorted(parts, key=lambda part: (str(places[part.name].path), places[part.name].offset)):
        stored = places[part.name]
        # a part that an earlier attempt began starts a run of its own: the request begins at its missing
        # bytes
        begun = part.place.with_name(f"{part.place.name}.part").exists()
        if run is not None and (run.file, end) == (stored.path.as_posix(), stored.offset) and not begun:
            run.parts.append(part)
        else:
            if run is not None:
                yield run
            run = _Run(stored.path.as_posix(), stored.offset, [part])
        end = stored.offset + part.num_bytes
    if run is not None:
        yield run


def _fill(
    first: PartFile, others: Sequence[ModelPart], chunks: Iterator[bytes], count: Callable[[int], None]
) -> list[ModelPart]:
    """Distribute ``chunks`` over the parts in order; return the parts that came with wrong bytes."""
    buffer = ChunkBuffer(chunks, count)
    wrong = [] if _fill_one(first, buffer) else [first.part]
    for part in others:
        with PartFile(part) as file:
            file.begin_anew()
            if not _fill_one(file, buffer):
                wrong.append(part)
    return wrong


class ChunkBuffer:
    """Split and join chunks of any size into pieces of the sizes asked for."""

    def __init__(
        self, chunks: Iterator[bytes], count: Callable[[int], None] = lambda _num_bytes: None
    ) -> None:
        self._chunks = chunks
        self._count = count
        self._left = memoryview(b"")

    def take(self, most: int) -> memoryview:
        """Return up to ``most`` bytes; none at the end."""
        if not self._left:
            self._left = memoryview(next(self._chunks, b""))
        taken, self._left = self._left[:most], self._left[most:]
        self._count(len(taken))
        return taken


def _fill_one(file: PartFile, buffer: ChunkBuffer) -> bool:
    while file.left:
        taken = buffer.take(file.left)
        if not taken:
            break
        file.write(taken)
    return file.finish()
