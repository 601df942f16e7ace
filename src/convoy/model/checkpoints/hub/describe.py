"""Describe a model on a hub by its config.json and the headers of its weights. No weight is fetched.

Headers are read by ranges, several files at once. All sizes are bounded, and nothing of the repository is
executed: JSON and headers are parsed, and other files are not asked for.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from convoy.errors import HubUnreachable, ModelError
from convoy.model.checkpoints.checkpoint import (
    FETCH_AGAIN,
    INDEX,
    MAX_INDEX_BYTES,
    SINGLE,
    StoredTensor,
    header_bytes,
    parse_header,
    parse_index,
)
from convoy.model.checkpoints.hub.files import Hub, HubName, Pinned, gguf_files
from convoy.model.checkpoints.hub.gguf import GgufPlaces
from convoy.model.checkpoints.hub.stream import HubCommit
from convoy.model.checkpoints.source import MAX_CONFIG_BYTES, ModelSource, parse_config
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.registry import read_family

_CONFIG = "config.json"
# The largest published models have about 200 files.
_MAX_SHARDS = 2048
# Of the headers of all files together; those of 671 billion weights take 12 MB.
MAX_HEADERS_BYTES = 64 << 20
# Bytes of a file that are asked for first: most headers are shorter.
_FIRST_BYTES = 64 << 10
_AT_ONCE = 8
_TRIES = 2
_HINT = "try again, or name a directory with the model; only its headers would be read"


def describe_on_hub(hub: Hub, name: HubName) -> ModelSource:
    """Return the description of a model, without its weights.

    A model that is here whole is read from this machine. Raises HubUnreachable, and ModelError for a
    repository that does not exist, or not for this user, and for files that are malformed or too long.
    """
    try:
        pinned = hub.pin(name)
        path = hub.downloaded(name, pinned)
        if path is not None:
            return ModelSource.resolve(str(path))
        return _describe(hub.at(name, pinned), name, pinned)
    except HubUnreachable as error:
        raise HubUnreachable(error.message, hint=_HINT, public=error.public) from error


def _describe(commit: HubCommit, name: HubName, pinned: Pinned) -> ModelSource:
    files = gguf_files(name, pinned)
    if files:
        model = GgufPlaces(commit, files[0]).model()
        return ModelSource.described(model.name, model.path, model.config, model.tensors)
    if _CONFIG not in pinned.files:
        raise ModelError(f"{name} has no {_CONFIG}", hint="is it a model for `transformers`?")
    config = parse_config(f"{_CONFIG} of {commit}", _whole(commit, _CONFIG, pinned, MAX_CONFIG_BYTES))
    # An unsupported model type is reported before any weight file is asked for.
    read_family(ConfigReader(config, name.repo))
    tensors = {one.name: one for one in _tensors(commit, _shards(commit, name, pinned), pinned)}
    return ModelSource.described(name.repo, Path(str(commit)), config, tensors)


def _whole(commit: HubCommit, file: str, pinned: Pinned, most: int) -> bytes:
    """Return a small file. Raises ModelError, before a byte comes, if the hub lists more than ``most``."""
    size = pinned.files[file].num_bytes
    if size > most:
        raise ModelError(f"{file} of {commit} has {size} bytes, expected at most {most}")
    data = commit.read(file, 0, most if size < 0 else size, tries=_TRIES)
    if len(data) < size:
        raise ModelError(f"{file} of {commit} is truncated: {len(data)} of {size} bytes came", hint=_HINT)
    return data


def _shards(commit: HubCommit, name: HubName, pinned: Pinned) -> list[str]:
    shards = [SINGLE]
    if INDEX in pinned.files:
        index = _whole(commit, INDEX, pinned, MAX_INDEX_BYTES)
        shards = sorted(set(parse_index(f"{INDEX} of {commit}", index).values()))
    if len(shards) > _MAX_SHARDS:
        raise ModelError(f"{INDEX} of {commit} names {len(shards)} files, expected at most {_MAX_SHARDS}")
    lacking = next((shard for shard in shards if shard not in pinned.files), None)
    if lacking is not None:
        raise ModelError(
            f"{name} has no {lacking}", hint="only safetensors are read: look for a conversion of the model"
        )
    return shards


def _tensors(commit: HubCommit, shards: Sequence[str], pinned: Pinned) -> Iterator[StoredTensor]:
    """Yield the tensors of all files. Raises ModelError, naming the file, for a header that does not fit."""
    budget = _Budget(str(commit))
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="hub-headers") as pool:
        futures = [pool.submit(_header, commit, shard, budget) for shard in shards]
        try:
            for shard, future in zip(shards, futures, strict=True):
                found = future.result()
                _check_inside(f"{shard} of {commit}", found, pinned.files[shard].num_bytes)
                yield from found
        finally:
            # One error is enough: the other headers are not asked for.
            pool.shutdown(wait=False, cancel_futures=True)


class _Budget:
    """Count the bytes of headers that all threads ask for."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._lock = threading.Lock()
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        """Count ``num_bytes`` before they are asked for. Raises ModelError beyond `MAX_HEADERS_BYTES`."""
        with self._lock:
            self._taken += num_bytes
            taken = self._taken
        if taken > MAX_HEADERS_BYTES:
            raise ModelError(
                f"the headers of {self._place} have {taken} bytes or more together, "
                f"expected at most {MAX_HEADERS_BYTES}"
            )


def _header(commit: HubCommit, file: str, budget: _Budget) -> list[StoredTensor]:
    place = f"{file} of {commit}"
    budget.take(_FIRST_BYTES)
    data = commit.read(file, 0, _FIRST_BYTES, tries=_TRIES)
    length = header_bytes(place, data[:8])
    budget.take(max(0, length + 8 - _FIRST_BYTES))
    if len(data) == _FIRST_BYTES and length + 8 > _FIRST_BYTES:
        data += commit.read(file, _FIRST_BYTES, 8 + length, tries=_TRIES)
    raw = data[8 : 8 + length]
    if len(raw) < length:
        raise ModelError(
            f"{place} is truncated: {len(raw)} of {length} bytes of its header came", hint=FETCH_AGAIN
        )
    return parse_header(Path(place), raw)


def _check_inside(place: str, tensors: Sequence[StoredTensor], size: int) -> None:
    """Raise ModelError if a header describes tensors beyond the end that the hub lists; -1: it lists none."""
    last = max(tensors, key=lambda tensor: tensor.offset + tensor.num_bytes, default=None)
    if last is not None and 0 <= size < last.offset + last.num_bytes:
        raise ModelError(
            f"{place} has {size} bytes, and its header describes {last.offset + last.num_bytes}, the last of "
            f"them of {last.name}",
            hint="the repository is damaged: look for another revision or copy of the model",
        )
