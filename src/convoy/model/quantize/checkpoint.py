"""Write a model as a checkpoint with rounded weights, in the layout of compressed-tensors.

The linears of attention, MLP and experts get the bits of the format, and `lm_head` gets 8. Its error reaches
every logit, and in most models it is the largest matrix. Everything else stays as it is stored: embeddings,
norms, biases, routers, and matrices whose inputs do not fill groups. What a source has packed in another way
is unpacked.

Files are written into a folder beside the wanted one, which gets its name at the end.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch

from convoy.config.files import FOLDER_HINT
from convoy.errors import ModelError, UsageError
from convoy.model.checkpoints.checkpoint import DTYPES, file_bytes
from convoy.model.checkpoints.manifest import FILES, MAX_FILE_BYTES
from convoy.model.checkpoints.names import decoder_name, is_matrix
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import Synthetic
from convoy.model.quantize.record import (
    FORMATS,
    QuantizeFormat,
    QuantizeRecord,
    RoundedKind,
    write_record,
)
from convoy.model.quantize.search import GROUP, RoundedMatrix, round_matrix
from convoy.model.quantize.shards import MAX_SHARD_BYTES, PlannedTensor, ShardWriter
from convoy.model.quantize.stacks import single_experts
from convoy.plan.spec.quantization import QUANTIZATION_KEYS

# of `lm_head`, in every format
_OUTPUT_BITS = 8
_OUTPUT = "lm_head.weight"
_CONFIG = "config.json"
# routers under names that families without rounded kernels have
_ROUTER = re.compile(r"\.(gate|router)(\.proj|\.layer)?\.weight\Z", re.ASCII)
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

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def kind(self) -> str:
        """Return the name that all layers have for it."""
        leaf = self.module.rpartition(".")[2]
        return f"experts.{leaf}" if ".experts." in self.name else leaf

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
class _Squares:
    """Add up the weighted squares of a kind of matrix: of its values, and of two errors."""

    bits: int = 0
    matrices: int = 0
    values: float = 0.0
    errors: float = 0.0
    nearest: float = 0.0

    def of_kind(self) -> RoundedKind:
        """Return the errors relative to the values."""
        whole = self.values or 1.0
        error, nearest = math.sqrt(self.errors / whole), math.sqrt(self.nearest / whole)
        return RoundedKind(self.matrices, self.bits, error, nearest)


@dataclass
class _Folder:
    """Write the tensors of one checkpoint, and measure the errors."""

    source: ModelSource
    writer: ShardWriter
    squares: dict[str, _Squares] = field(default_factory=lambda: defaultdict(_Squares))

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
        own = self.squares[matrix.kind]
        own.bits, own.matrices = matrix.bits, own.matrices + 1
        own.values += found.square
        own.errors += found.error
        own.nearest += found.nearest_error
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
    plan = _plan(source, FORMATS[form])
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


def _plan(source: ModelSource, bits: int) -> dict[str, list[_Matrix]]:
    """Return the tensors of the new checkpoint, by the source's tensor that they come from."""
    plan: dict[str, list[_Matrix]] = {}
    for name, shape in source.layout.shapes(source.tensors).items():
        whole = source.layout.made.get(name)
        dtype = source.tensors[name].dtype if whole is None else _HEADER_NAMES[whole.dtype]
        if dtype not in DTYPES:
            stored = source.tensors[name]
            raise ModelError(f"{stored.path}: {name} has the dtype {dtype}, which is not supported")
        known = decoder_name(name)
        if not is_matrix(known, shape) or _ROUTER.search(name) is not None:
            plan[name] = [_Matrix(name, shape, dtype)]
        elif len(shape) == 3:
            plan[name] = [
                _Matrix(own, (num_rows, width), dtype, _bits(own, width, source, bits), index)
                for own, (num_rows, width), index in single_experts(source, name, shape)
            ]
        else:
            plan[name] = [_Matrix(name, shape, dtype, _bits(known, shape[1], source, bits))]
    if not any(matrix.bits for own in plan.values() for matrix in own):
        raise ModelError(
            f"{source.name} has no matrix with a multiple of {GROUP} inputs, so none can be rounded"
        )
    return plan


def _bits(name: str, width: int, source: ModelSource, bits: int) -> int:
    """Return the bits of a matrix with rows of ``width``, or 0 if it stays as it is."""
    if width % GROUP or name.startswith("model.embed_tokens."):
        return 0
    if name == _OUTPUT:
        # tied, it is the embedding
        return 0 if source.spec.tied_embeddings else _OUTPUT_BITS
    return bits


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
    record = _record(source, form, checkpoint.squares, total, after)
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


def _record(
    source: ModelSource, form: QuantizeFormat, squares: Mapping[str, _Squares], before: int, after: int
) -> QuantizeRecord:
    whole = _Squares()
    for one in squares.values():
        whole.values += one.values
        whole.errors += one.errors
        whole.nearest += one.nearest
    overall = whole.of_kind()
    return QuantizeRecord(
        model=source.name,
        digest=source.digest,
        format=form,
        group_size=GROUP,
        bytes_before=before,
        bytes_after=after,
        error=overall.error,
        nearest_error=overall.nearest_error,
        kinds={kind: one.of_kind() for kind, one in sorted(squares.items())},
    )
