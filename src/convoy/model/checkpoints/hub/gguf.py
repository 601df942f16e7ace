"""Choose the GGUF files of a hub's model, and read their headers by ranges.

A repository has the same model in several files. A name picks one of them: ``org/name:FILE.gguf`` by the
file, and ``org/name:Q4_K_M`` by the quantisation that ends the file's name, as llama.cpp's ``-hf`` does.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable
from pathlib import Path, PurePosixPath

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.gguf.header import (
    MAX_HEADER_BYTES,
    GgufHeader,
    TruncatedHeaderError,
    read_gguf,
)
from convoy.model.checkpoints.formats.gguf.model import GgufModel, open_gguf
from convoy.model.checkpoints.formats.gguf.names import FACTORS
from convoy.model.checkpoints.formats.gguf.split import SUFFIX, is_beside, model_name, shard_paths
from convoy.model.checkpoints.hub.stream import HubCommit, Watch

# bytes of a header that are asked for first; each further request asks for as many as have come
FIRST_BYTES = 1 << 20
_MAX_FACTOR_BYTES = 1 << 20
_MAX_NAMED = 6


def choose_gguf(name: str, asked: str, files: Collection[str]) -> list[str]:
    """Return the files of one GGUF model of the repository ``name``, of the names in ``files``.

    ``asked`` is a file, a quantisation, or empty for the only model there is. Raises ModelError with the
    files if none or several fit.
    """
    models: dict[str, str] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix == SUFFIX and not is_beside(Path(path)):
            models.setdefault(str(path.parent / model_name(Path(path))), file)
    fitting = [file for file in models.values() if fits_gguf(asked, file)]
    if len(fitting) > 1 and asked:
        # Q4_K_XL and UD-Q4_K_XL end alike: the shorter name is the one that was asked for
        shortest = min(map(len, fitting))
        fitting = [file for file in fitting if len(file) == shortest]
    if len(fitting) != 1:
        what = f"{len(fitting)} GGUF models" + (f" that fit {asked}" if asked else "")
        known = ", ".join(list(models.values())[:_MAX_NAMED])
        raise ModelError(
            f"{name} has {what}" + (f", of {len(models)}: {known}" if known else ""),
            hint="name a quantisation, org/name:Q4_K_M, or a file, org/name:FILE.gguf",
        )
    shards = [Path(one).as_posix() for one in shard_paths(Path(fitting[0]))]
    lacking = next((one for one in shards if one not in files), None)
    if lacking is not None:
        raise ModelError(f"{name} lacks {lacking}, one of the {len(shards)} files of its model")
    return shards


def fits_gguf(asked: str, file: str) -> bool:
    """Return whether ``asked``, a file or a quantisation, or empty for any, stands for ``file``."""
    path = Path(file)
    if asked.endswith(SUFFIX):
        own = [shard.as_posix() for shard in shard_paths(path)]
        return asked in own or asked in [PurePosixPath(one).name for one in own]
    stem, tag = model_name(path).lower(), asked.lower()
    return not tag or stem == tag or stem.endswith((f"-{tag}", f".{tag}"))


class GgufPlaces:
    """Find the tensors of a commit's GGUF files by the library's names. The headers read are kept."""

    def __init__(self, commit: HubCommit, file: str, first_bytes: int = FIRST_BYTES) -> None:
        self._commit, self.file = commit, file
        self._first_bytes = first_bytes
        self._model: GgufModel | None = None

    def find(self, names: Collection[str], watch: Watch = lambda: None) -> dict[str, StoredTensor]:
        """Return those of ``names`` that the files have; each tensor's path is its file's name.

        Raises HubUnreachable, and ModelError for files that are missing or malformed.
        """
        tensors = self.model(watch).tensors
        return {name: tensors[name] for name in names if name in tensors}

    def model(self, watch: Watch = lambda: None) -> GgufModel:
        """Return the description of the model. Raises as `find` does."""
        if self._model is None:
            self._model = _read(self._commit, self.file, self._first_bytes, watch)
        return self._model


def _read(commit: HubCommit, file: str, first_bytes: int, watch: Watch) -> GgufModel:
    """Read the headers of all files of a model, in a folder that is removed again."""
    files = [path.as_posix() for path in shard_paths(Path(file))]
    try:
        with tempfile.TemporaryDirectory(prefix="convoy-gguf-") as folder:
            left = MAX_HEADER_BYTES
            for one in files:
                place = Path(folder) / PurePosixPath(one).name
                left -= _read_header(commit, one, place, (min(first_bytes, left), left), watch)
            found = open_gguf(Path(folder) / PurePosixPath(files[0]).name, whole=False)
            names = {PurePosixPath(one).name: Path(one) for one in files}
            tensors = {name: _on_hub(tensor, names) for name, tensor in found.tensors.items()}
            return GgufModel(found.name, Path(files[0]), found.header_bytes, found.config, tensors)
    except OSError as error:
        reason = (error.strerror or "unwritable").lower()
        raise ModelError(f"the header of {file} of {commit} cannot be kept: {reason}") from error


def _on_hub(tensor: StoredTensor, names: dict[str, Path]) -> StoredTensor:
    where = names[tensor.path.name]
    return StoredTensor(tensor.name, where, tensor.dtype, tensor.shape, tensor.offset, tensor.num_bytes)


def _read_header(commit: HubCommit, file: str, place: Path, limits: tuple[int, int], watch: Watch) -> int:
    """Write a file's header to ``place``, with the factors of frequencies, and return the bytes read.

    ``limits`` are the bytes to ask for first, and the most of all.
    """
    size, (first, most) = 0, limits
    while True:
        wanted = min(max(first, size), most - size)
        data = commit.read(file, size, size + wanted, watch=watch) if wanted else b""
        with place.open("ab") as out:
            out.write(data)
        size += len(data)
        try:
            header = read_gguf(place, whole=False)
        except TruncatedHeaderError as error:
            if len(data) < wanted or not wanted:
                raise ModelError(f"{file} of {commit}: {error.message}", hint=error.hint) from error
            continue
        except ModelError as error:
            raise ModelError(f"{file} of {commit}: {error.message}", hint=error.hint) from error
        _read_factors(commit, file, place, _factors(header), watch)
        return size


def _factors(header: GgufHeader) -> Iterable[StoredTensor]:
    """Return the tensors that the settings are made of; the reader of settings refuses larger ones."""
    own = (header.tensors[name] for name in FACTORS if name in header.tensors)
    return [tensor for tensor in own if tensor.num_bytes <= _MAX_FACTOR_BYTES]


def _read_factors(
    commit: HubCommit, file: str, place: Path, factors: Iterable[StoredTensor], watch: Watch
) -> None:
    for tensor in factors:
        end = tensor.offset + tensor.num_bytes
        data = commit.read(file, tensor.offset, end, watch=watch)
        with place.open("r+b") as out:
            out.seek(tensor.offset)
            out.write(data)
