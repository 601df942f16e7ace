"""Keep the measured error of rounded weights beside them: the file convoy_quantize.json of a folder.

It is apart from the modules that round because a parity certificate reads it, and rounds nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from convoy.config.type_resolution import resolved
from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import file_bytes

RECORD = "convoy_quantize.json"
QuantizeFormat = Literal["q4", "q8"]
# the bits of each word of --format
FORMATS: Mapping[QuantizeFormat, int] = {"q4": 4, "q8": 8}
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
