"""Padding to a few sizes, so that the length of sealed data says little about its content."""

from __future__ import annotations

from convoy.errors import SealError

_LENGTH_BYTES = 4


def pad(data: bytes, least: int) -> bytes:
    """Return the length, ``data`` and zeros.

    The size is ``least`` times a power of two, or that plus its half.
    """
    filling = bytes(padded_size(len(data), least) - _LENGTH_BYTES - len(data))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data + filling


def padded_size(num_bytes: int, least: int) -> int:
    """Return the size that `pad` makes of so many bytes."""
    size, needed = least, _LENGTH_BYTES + num_bytes
    while size < needed:
        if size + size // 2 >= needed:
            size += size // 2
        else:
            size *= 2
    return size


def most_unpadded(padded_bytes: int) -> int:
    """Return the most bytes that `pad` can have turned into this size."""
    return max(0, padded_bytes - _LENGTH_BYTES)


def unpad(padded: bytes) -> bytes:
    """Return the data given to `pad`.

    Raises `SealError` for a length that does not fit, or a tail that is not zeros.
    """
    length = int.from_bytes(padded[:_LENGTH_BYTES], "big")
    end = _LENGTH_BYTES + length
    if len(padded) < _LENGTH_BYTES or end > len(padded):
        raise SealError(f"{len(padded)} padded bytes say that they hold {length}")
    if any(padded[end:]):
        raise SealError("the padding after the data is not zeros")
    return padded[_LENGTH_BYTES:end]
