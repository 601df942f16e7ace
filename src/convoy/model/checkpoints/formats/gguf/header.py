"""Read the header of a GGUF file: its settings and the places of its tensors.

Every length is checked against the file, and against bounds that no model reaches, before memory is taken.
ggml's docs/gguf.md describes the format. The vocabulary's tokens are skipped, not read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import FETCH_AGAIN, StoredTensor

# ggml's number of a type: its name, the numbers in a block, and the bytes of a block
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
}
# types of ggml that the `gguf` package does not unpack
_NOT_UNPACKED = {
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    41: "Q1_0",
}
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_KEY_BYTES = 1 << 16
_MAX_TENSORS, _MAX_SETTINGS = 1 << 17, 1 << 14
# the largest vocabularies take 20 MB, and a chat template some kilobytes
MAX_HEADER_BYTES = 128 << 20
_MAX_TEXT_BYTES = 16 << 20
_MAX_DIMENSIONS = 4
# longer arrays are skipped
_MAX_READ = 1 << 10
# of all settings together; the largest vocabulary has a quarter of a million tokens and twice as many merges
_MAX_STRINGS = 1 << 23
_ALIGNMENT = 32


class TruncatedHeaderError(ModelError):
    """Say that a header continues past the end of its file."""


@dataclass(frozen=True)
class GgufHeader:
    """Hold the settings and tensors of a header.

    ``settings`` are numbers, strings and short lists. A long list is skipped; its length is stored under
    ``#KEY``.
    """

    settings: dict[str, object]
    # by their names in the file; shapes begin with the longest stride
    tensors: dict[str, StoredTensor]
    # bytes before the first tensor
    num_bytes: int


def read_gguf(path: Path, *, whole: bool = True) -> GgufHeader:
    """Read a header. Raises ModelError if it is truncated, not GGUF, or has an unknown tensor type.

    The file's tensors need not be there if it is not ``whole``.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reading(path, data, whole=whole).header()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelError(
            f"{path} cannot be read: {(reason or 'unreadable').lower()}",
            hint="check the path, and that you may read the file",
        ) from error


class _Reading:
    """Read values of the header in order."""

    def __init__(self, path: Path, data: mmap.mmap, *, whole: bool) -> None:
        self._path = path
        self._whole = whole
        self._data = data
        self._at = 0
        self._strings_left = _MAX_STRINGS

    def header(self) -> GgufHeader:
        magic, version = self._take(4), self._number("I")
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ModelError(f"{self._path} is no GGUF file of version 2 or 3", hint=FETCH_AGAIN)
        num_tensors, num_settings = self._count(_MAX_TENSORS), self._count(_MAX_SETTINGS)
        settings: dict[str, object] = {}
        for _ in range(num_settings):
            key = self._word()
            kind = self._number("I")
            value = self._value(kind)
            is_passed = isinstance(value, _Passed)
            name = f"#{key}" if is_passed else key
            if name in settings:
                raise ModelError(f"{self._path}: the header has the setting {key[:80]!r} twice")
            settings[name] = value.length if isinstance(value, _Passed) else value
        described = [self._tensor() for _ in range(num_tensors)]
        alignment = settings.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
            raise ModelError(f"{self._path}: general.alignment is {alignment!r}, expected 1 to {1 << 20}")
        base = -(-self._at // alignment) * alignment
        placed = {tensor.name: self._placed(tensor, base) for tensor in described}
        if len(placed) != len(described):
            raise ModelError(f"{self._path}: the header has {len(described) - len(placed)} tensors twice")
        self._require_apart(placed.values())
        return GgufHeader(settings, placed, base)

    def _require_apart(self, tensors: Iterable[StoredTensor]) -> None:
        """Raise ModelError for tensors that share bytes: a small file could describe a huge model."""
        last: StoredTensor | None = None
        for tensor in sorted(tensors, key=lambda one: one.offset):
            if last is not None and tensor.offset < last.offset + last.num_bytes:
                raise ModelError(f"{self._path}: {tensor.name} begins within {last.name}", hint=FETCH_AGAIN)
            last = tensor

    def _tensor(self) -> StoredTensor:
        name = self._word()
        shape = tuple(self._number("Q") for _ in range(self._count(_MAX_DIMENSIONS, "I")))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            raise ModelError(
                f"{self._path}: {name} has ggml's type {_NOT_UNPACKED.get(kind, kind)}, expected one of "
                f"{', '.join(known for known, _, _ in TYPES.values())}",
                hint="choose a file with another quantisation",
            )
        dtype, block, block_bytes = TYPES[kind]
        if not shape or 0 in shape or shape[-1] % block:
            raise ModelError(
                f"{self._path}: {name} is {dtype} of shape {list(shape)}, "
                f"expected rows of whole blocks of {block}"
            )
        return StoredTensor(name, self._path, dtype, shape, offset, math.prod(shape) // block * block_bytes)

    def _placed(self, tensor: StoredTensor, base: int) -> StoredTensor:
        end, size = base + tensor.offset + tensor.num_bytes, len(self._data)
        if end > size and self._whole:
            raise ModelError(
                f"{self._path} is truncated: it has {size} bytes, and {tensor.name} ends at {end}",
                hint=FETCH_AGAIN,
            )
        offset = base + tensor.offset
        return StoredTensor(tensor.name, tensor.path, tensor.dtype, tensor.shape, offset, tensor.num_bytes)

    def _value(self, kind: int) -> object:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        raise ModelError(
            f"{self._path}: a setting has the type {kind}, which GGUF does not have", hint=FETCH_AGAIN
        )

    def _array(self) -> object:
        kind, length = self._number("I"), self._number("Q")
        if kind in _NUMBERS and length > _MAX_READ:
            self._pass(struct.calcsize(f"<{_NUMBERS[kind]}") * length)
            return _Passed(length)
        if kind not in _NUMBERS and (kind != _STRING or length > self._strings_left):
            raise ModelError(f"{self._path}: a setting has {length} values of the type {kind}")
        self._strings_left -= length if kind == _STRING else 0
        if length <= _MAX_READ:
            return [self._value(kind) for _ in range(length)]
        for _ in range(length):
            self._pass(self._number("Q"))
        return _Passed(length)

    def _word(self) -> str:
        return str(self._take(self._count(_MAX_KEY_BYTES)), "utf-8", "replace")

    def _text(self) -> str:
        return str(self._take(self._count(_MAX_TEXT_BYTES)), "utf-8", "replace")

    def _count(self, most: int, form: str = "Q") -> int:
        found = self._number(form)
        if found > most:
            raise ModelError(
                f"{self._path} is no GGUF file: a length of {found}, expected at most {most}",
                hint=FETCH_AGAIN,
            )
        return found

    def _number(self, form: str) -> int:
        (found,) = struct.unpack(f"<{form}", self._take(struct.calcsize(f"<{form}")))
        return found  # type: ignore[no-any-return]

    def _take(self, num_bytes: int) -> bytes:
        start = self._at
        self._pass(num_bytes)
        return self._data[start : self._at]

    def _pass(self, num_bytes: int) -> None:
        end = self._at + num_bytes
        if end > MAX_HEADER_BYTES:
            raise ModelError(
                f"{self._path} is no GGUF file: its header takes more than {MAX_HEADER_BYTES} bytes",
                hint=FETCH_AGAIN,
            )
        if end > len(self._data):
            raise TruncatedHeaderError(
                f"{self._path} is truncated: its header continues past its end", hint=FETCH_AGAIN
            )
        self._at = end


@dataclass(frozen=True)
class _Passed:
    """Represent a list that was skipped."""

    length: int
