"""Keep the measured error of rounded weights: in a folder's file convoy_quantize.json, or for a certificate.

It is apart from the modules that round because a parity certificate reads it, and rounds nothing.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import get_args

import msgspec

from convoy.config.kernels import KERNELS, QUANTIZED, QuantizeFormat
from convoy.config.type_resolution import resolved
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import file_bytes

RECORD = "convoy_quantize.json"
# the bits of each word of --format
FORMATS: Mapping[QuantizeFormat, int] = {
    word: KERNELS[QUANTIZED[word]].form.bits for word in get_args(QuantizeFormat)
}
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True)
class RoundedKind:
    """Hold the errors of all matrices of one kind, such as "q_proj".

    An error is the weighted root mean square of the differences from the source, over that of the source's
    values. ``nearest_error`` is that of rounding to the nearest, without a search.
    """

    matrices: int
    bits: int
    error: float
    nearest_error: float


@dataclass(frozen=True)
class QuantizeRecord:
    """Say how `convoy quantize` rounded a model's weights, and the errors by kind of matrix."""

    # the source's name, and the digest of its configuration and tensors
    model: str
    digest: str
    format: QuantizeFormat
    group_size: int
    # of the whole model's tensors
    bytes_before: int
    bytes_after: int
    # over all rounded matrices
    error: float
    nearest_error: float
    kinds: Mapping[str, RoundedKind]


@dataclass
class _Squares:
    """Add up the weighted squares of a kind of matrix: of its values, and of two errors."""

    bits: int = 0
    names: set[str] = field(default_factory=set)
    values: float = 0.0
    errors: float = 0.0
    nearest: float = 0.0

    def of_kind(self) -> RoundedKind:
        """Return the errors relative to the values."""
        whole = self.values or 1.0
        error, nearest = math.sqrt(self.errors / whole), math.sqrt(self.nearest / whole)
        return RoundedKind(len(self.names), self.bits, error, nearest)


class ErrorSums:
    """Add up the errors of a model's matrices as they are rounded."""

    def __init__(self) -> None:
        self._kinds: defaultdict[str, _Squares] = defaultdict(_Squares)

    def add(self, name: str, bits: int, squares: tuple[float, float, float]) -> None:
        """Add a matrix, or some outputs of it, by its name.

        ``squares`` are the weighted sums of its values, its errors and its errors without a search.
        """
        module = name.removesuffix(".weight")
        leaf = module.rpartition(".")[2]
        own = self._kinds[f"experts.{leaf}" if ".experts." in name else leaf]
        own.bits = bits
        own.names.add(name)
        own.values += squares[0]
        own.errors += squares[1]
        own.nearest += squares[2]

    def record(
        self, model: tuple[str, str], form: QuantizeFormat, num_bytes: tuple[int, int]
    ) -> QuantizeRecord:
        """Return the record of a ``model``, its name and digest, with its bytes before and after."""
        whole = _Squares()
        for one in self._kinds.values():
            whole.values += one.values
            whole.errors += one.errors
            whole.nearest += one.nearest
        overall = whole.of_kind()
        return QuantizeRecord(
            *model,
            format=form,
            group_size=KERNELS[QUANTIZED[form]].form.group,
            bytes_before=num_bytes[0],
            bytes_after=num_bytes[1],
            error=overall.error,
            nearest_error=overall.nearest_error,
            kinds={kind: one.of_kind() for kind, one in sorted(self._kinds.items())},
        )


def write_record(folder: Path, record: QuantizeRecord) -> None:
    """Write the record into ``folder``. Raises OSError."""
    text = json.dumps(asdict(record), indent=2)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def read_record(folder: Path) -> QuantizeRecord | None:
    """Return the record in ``folder``, or None if it has none.

    Raises ModelError for one that is malformed.
    """
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        found = json.loads(file_bytes(path, _MAX_RECORD_BYTES))
        return msgspec.convert(found, resolved(QuantizeRecord))
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise ModelError(
            f"{path} is not what `convoy quantize` writes",
            hint="quantize the model again, or remove the file: weights do not depend on it",
        ) from error
