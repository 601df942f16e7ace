"""Write a model as a checkpoint with rounded weights, in the layout of compressed-tensors.

`parts` says which matrices are rounded. Everything else stays as it is stored, and a tensor that a source
has packed in another way is unpacked.

Files are written into a folder beside the wanted one, which gets its name at the end.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convoy.config.files import FOLDER_HINT
from convoy.config.kernels import QuantizeFormat
from convoy.errors import ModelError, UsageError
from convoy.model.checkpoints.checkpoint import DTYPES, file_bytes
from convoy.model.checkpoints.manifest import FILES, MAX_FILE_BYTES
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import Synthetic
from convoy.model.quantize.parts import MatrixPart, expert_names, matrix_parts, require_rounded
from convoy.model.quantize.record import (
    FORMATS,
    ErrorSums,
    QuantizeRecord,
    write_record,
)
from convoy.model.quantize.search import GROUP, RoundedMatrix, round_matrix
from convoy.model.quantize.shards import MAX_SHARD_BYTES, PlannedTensor, ShardWriter
from convoy.plan.spec.quantization import QUANTIZATION_KEYS

_CONFIG = "config.json"
# bytes that stay free on the disk
_SPARE_BYTES = 64 << 20
_HEADER_NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}

# called with (bytes read, bytes in all)
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Quantized:
    """Hold a finished checkpoint: its folder, its record, and the duration."""

    folder: Path
    record: QuantizeRecord
    duration_s: float


@dataclass(frozen=True)
class _Matrix:
    """Describe a tensor of the new checkpoint; it is rounded if it has ``bits``.

    ``index`` is its place in the source's tensor, of which it may be a part.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bits: int = 0
    index: tuple[int | slice, ...] = ()

    @classmethod
    def of(cls, part: MatrixPart, dtype: str) -> _Matrix:
        """Return the tensor of a part; ``dtype`` is that of the source."""
        return cls(part.name, part.shape, dtype, part.bits, part.index)

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def planned(self) -> list[PlannedTensor]:
        """Return the tensors that stand for it."""
        if not self.bits:
            return [PlannedTensor(self.name, self.dtype, self.shape)]
        num_rows, width = self.shape
        return [
            PlannedTensor(f"{self.name}_packed", "I32", (num_rows, width * self.bits // 32)),
            PlannedTensor(f"{self.name}_scale", "BF16", (num_rows, width // GROUP)),
            PlannedTensor(f"{self.name}_shape", "I64", (2,)),
        ]


@dataclass
class _Folder:
    """Write the tensors of one checkpoint, and measure the errors."""

    source: ModelSource
    writer: ShardWriter
    errors: ErrorSums = field(default_factory=ErrorSums)

    def write(self, name: str, matrices: Iterable[_Matrix]) -> None:
        """Read a tensor of the source, and write those that come of it.

        Raises ModelError for a tensor that cannot be read, and for NaN and infinity.
        """
        whole = read_tensor(self.source, name)
        for matrix in matrices:
            values = whole[matrix.index] if matrix.index else whole
            if not matrix.bits:
                self.writer.write(matrix.name, values)
                continue
            found = self._round(values, matrix)
            self.writer.write(f"{matrix.name}_packed", found.packed(matrix.bits))
            self.writer.write(f"{matrix.name}_scale", found.scales)
            self.writer.write(f"{matrix.name}_shape", torch.tensor(matrix.shape))

    def _round(self, values: torch.Tensor, matrix: _Matrix) -> RoundedMatrix:
        found = round_matrix(values, matrix.bits)
        if not math.isfinite(found.error):
            raise ModelError(f"{self.source.name}: {matrix.name} holds a value that is not a number")
        self.errors.add(matrix.name, matrix.bits, (found.square, found.error, found.nearest_error))
        return found


def quantize(
    source: ModelSource,
    form: QuantizeFormat,
    out: Path,
    progress: Progress = lambda _done, _total: None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Quantized:
    """Write ``source`` in ``form``, a key of FORMATS, to the folder ``out``, which is missing or empty.

    Nothing stays of a call that is interrupted or fails. Raises ModelError for a source that cannot be read
    or rounded and for a disk without room, and UsageError for a folder with files.
    """
    started = time.monotonic()
    require_unused(out)
    plan = _plan(source, form)
    try:
        folder = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
        try:
            record = _write(source, form, folder, plan, progress, max_shard_bytes=max_shard_bytes)
            folder.chmod(0o755)
            # an empty folder gives way
            folder.rename(out)
        finally:
            # after the rename there is nothing left to remove
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        reason = (error.strerror or "unwritable").lower()
        raise ModelError(f"cannot write {out}: {reason}", hint=FOLDER_HINT) from error
    return Quantized(out, record, time.monotonic() - started)


def require_unused(out: Path) -> None:
    """Raise UsageError if ``out`` is a file, or a folder with files."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        what = "a folder with files" if out.is_dir() else "no folder"
        raise UsageError(f"--out {out} is {what}", hint="name a new folder: --out DIR")


def _plan(source: ModelSource, form: QuantizeFormat) -> dict[str, list[_Matrix]]:
    """Return the tensors of the new checkpoint, by the source's tensor that they come from.

    Raises ModelError for a family whose experts files hold as stacks only.
    """
    plan: dict[str, list[_Matrix]] = {}
    bits = FORMATS[form]
    require_rounded(source, bits)
    for name, shape in source.layout.shapes(source.tensors).items():
        whole = source.layout.made.get(name)
        dtype = source.tensors[name].dtype if whole is None else _HEADER_NAMES[whole.dtype]
        if dtype not in DTYPES:
            stored = source.tensors[name]
            raise ModelError(f"{stored.path}: {name} has the dtype {dtype}, which is not supported")
        parts = matrix_parts(source, name, shape, bits)
        if len(shape) == 3 and parts and expert_names(source.spec.family) is None:
            raise ModelError(
                f"{source.name}: {name} holds all experts of a layer, and {source.spec.family} has no form "
                "in which each is rounded by itself",
                hint="use a checkpoint of the model that is quantised already, such as MXFP4, MLX or GGUF, "
                f"or round it at load: --quantize {form}",
            )
        plan[name] = [_Matrix.of(part, dtype) for part in parts] or [_Matrix(name, shape, dtype)]
    return plan


def _write(
    source: ModelSource,
    form: QuantizeFormat,
    folder: Path,
    plan: Mapping[str, list[_Matrix]],
    progress: Progress,
    *,
    max_shard_bytes: int,
) -> QuantizeRecord:
    """Write all files of the checkpoint into ``folder``, and return its record."""
    matrices = [matrix for own in plan.values() for matrix in own]
    planned = [tensor for matrix in matrices for tensor in matrix.planned()]
    _require_room(folder, sum(tensor.num_bytes for tensor in planned))
    with closing(ShardWriter(folder, planned, max_shard_bytes)) as writer:
        checkpoint = _Folder(source, writer)
        done, total = 0, sum(tensor.num_bytes for tensor in source.tensors.values())
        for name, own in plan.items():
            checkpoint.write(name, own)
            done += _stored_bytes(source, name)
            progress(done, total)
        writer.finish()
        after = writer.num_bytes
    config = {key: value for key, value in source.config.items() if key not in QUANTIZATION_KEYS}
    config["quantization_config"] = _settings(matrices, FORMATS[form])
    (folder / _CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for name, data in _other_files(source):
        (folder / name).write_bytes(data)
    # the headers must be those of a model, before the folder gets its name
    ModelSource.resolve(str(folder))
    record = checkpoint.errors.record((source.name, source.digest), form, (total, after))
    write_record(folder, record)
    return record


def _settings(matrices: list[_Matrix], bits: int) -> dict[str, object]:
    """Return the quantization_config of compressed-tensors.

    Linears have the first group. Modules that have another number of bits are named in a second one.
    """
    others: dict[int, list[str]] = {}
    for matrix in matrices:
        if matrix.bits not in {0, bits}:
            others.setdefault(matrix.bits, []).append(matrix.module)
    groups = [(bits, ["Linear"]), *others.items()]
    kept = [
        one.module
        for one in matrices
        if not one.bits and len(one.shape) == 2 and one.name.endswith(".weight")
    ]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": kept,
        "config_groups": {
            f"group_{number}": {
                "targets": targets,
                "weights": {
                    "num_bits": own_bits,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": GROUP,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
            for number, (own_bits, targets) in enumerate(groups)
        },
    }


def _other_files(source: ModelSource) -> Iterator[tuple[str, bytes]]:
    """Yield the files of tokeniser, template and generation settings, by name."""
    if source.is_one_file:
        yield from ((name, data) for name, data in source.own_files.items() if name != _CONFIG)
        return
    synthetic = Synthetic.parse(str(source.path)) if source.seed is not None else None
    folder = source.path if synthetic is None else synthetic.tokenizer
    for name in FILES if folder is not None else ():
        assert folder is not None
        if name != _CONFIG and (folder / name).is_file():
            yield name, file_bytes(folder / name, MAX_FILE_BYTES)


def _stored_bytes(source: ModelSource, name: str) -> int:
    whole = source.layout.made.get(name)
    parts = [source.tensors[name]] if whole is None else whole.parts.values()
    return sum(part.num_bytes for part in parts)


def _require_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes + _SPARE_BYTES > free:
        raise ModelError(
            f"the checkpoint has {num_bytes} bytes, and the disk of {folder.parent} has {free} free",
            hint="free some, or name a folder on another disk: --out DIR",
        )
