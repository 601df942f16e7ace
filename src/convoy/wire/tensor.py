"""A tensor on its way over a link: dtype, shape and raw row-major little-endian bytes that fit each other."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field

from convoy.errors import FrameError, FrameTooLong

# Data follows the descriptor in one buffer, so its size keeps the data aligned for any dtype.
DESCRIPTOR_BYTES = 64
MAX_DIMENSIONS = 6

# By name: (number on the wire, bytes per element).
DTYPES: dict[str, tuple[int, int]] = {
    "float32": (1, 4),
    "bfloat16": (2, 2),
    "float16": (3, 2),
}
_BY_NUMBER = {number: (name, size) for name, (number, size) in DTYPES.items()}
_DESCRIPTOR = struct.Struct("<BB6sQ6Q")
_PADDING = bytes(6)


@dataclass(frozen=True, slots=True)
class WireTensor:
    """Hold the bytes of a tensor.

    Raises `FrameError` unless ``data`` has exactly the size of ``shape`` in ``dtype``.
    """

    dtype: str
    shape: tuple[int, ...]
    data: memoryview | bytes = field(repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.data, memoryview) and not self.data.c_contiguous:
            raise FrameError("a tensor's memory is not contiguous")
        expected = tensor_bytes(self.dtype, self.shape)
        if self.nbytes != expected:
            raise FrameError(
                f"a {self.dtype} tensor of shape {self.shape} has {self.nbytes} bytes, expected {expected}"
            )

    @property
    def nbytes(self) -> int:
        return self.data.nbytes if isinstance(self.data, memoryview) else len(self.data)


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a dense tensor. Raises `FrameError` for a dtype or shape that never crosses a
    link.
    """
    if dtype not in DTYPES:
        raise FrameError(f"dtype {dtype} does not cross links, expected one of {', '.join(DTYPES)}")
    if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0):
        raise FrameError(f"a tensor has shape {shape}, expected at most {MAX_DIMENSIONS} sizes of 0 or more")
    return DTYPES[dtype][1] * math.prod(shape)


def encode_descriptor(tensor: WireTensor) -> bytes:
    """Return the DESCRIPTOR_BYTES that stand before the data, inside the first sealed record."""
    sizes = [*tensor.shape, *([0] * (MAX_DIMENSIONS - len(tensor.shape)))]
    return _DESCRIPTOR.pack(DTYPES[tensor.dtype][0], len(tensor.shape), _PADDING, tensor.nbytes, *sizes)


def decode_descriptor(
    data: bytes | bytearray | memoryview, max_bytes: int
) -> tuple[str, tuple[int, ...], int]:
    """Return dtype, shape and size in bytes. Allocates nothing.

    Raises `FrameError`, and `FrameTooLong` above ``max_bytes``.
    """
    if len(data) < DESCRIPTOR_BYTES:
        raise FrameError(f"a tensor's first record has {len(data)} bytes, fewer than {DESCRIPTOR_BYTES}")
    number, num_dimensions, padding, nbytes, *sizes = _DESCRIPTOR.unpack_from(data)
    if number not in _BY_NUMBER or num_dimensions > MAX_DIMENSIONS or any(sizes[num_dimensions:]):
        raise FrameError(f"a tensor descriptor has dtype {number} and {num_dimensions} dimensions")
    if padding != _PADDING:
        raise FrameError("a tensor descriptor has other bytes than 0 where it has no field")
    dtype = _BY_NUMBER[number][0]
    shape = tuple(sizes[:num_dimensions])
    expected = tensor_bytes(dtype, shape)
    if nbytes != expected:
        raise FrameError(f"a {dtype} tensor of shape {shape} claims {nbytes} bytes, expected {expected}")
    if nbytes > max_bytes:
        raise FrameTooLong(f"a tensor claims {nbytes} bytes, and the limit is {max_bytes}")
    return dtype, shape, nbytes
