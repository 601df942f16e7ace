"""Padding to a few sizes, so that the length of what is sealed says little of what it is."""

from __future__ import annotations

from convoy.errors import SealError

_LENGTH_BYTES = 4


def pad(data: bytes, least: int) -> bytes:
    """Length, ``data``, zeros: ``least`` times a power of two, or that plus a half of it."""
    filling = bytes(padded_size(len(data), least) - _LENGTH_BYTES - len(data))
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data + filling


def padded_size(num_bytes: int, least: int) -> int:
    """What `pad` makes of so many bytes."""
    size, needed = least, _LENGTH_BYTES + num_bytes
    while size < needed:
        if size + size // 2 >= needed:
            size += size // 2
        else:
            size *= 2
    return size


def most_unpadded(padded_bytes: int) -> int:
    """Return how many bytes may be in what `pad` made so long."""
    return max(0, padded_bytes - _LENGTH_BYTES)


def unpad(padded: bytes) -> bytes:
    """What `pad` was given. Raises `SealError` for a length that does not fit, or a tail of no zeros."""
    length = int.from_bytes(padded[:_LENGTH_BYTES], "big")
    end = _LENGTH_BYTES + length
    if len(padded) < _LENGTH_BYTES or end > len(padded):
        raise SealError(f"{len(padded)} padded bytes say that they hold {length}")
    if any(padded[end:]):
        raise SealError("what fills up padded bytes is not zeros")
    return padded[_LENGTH_BYTES:end]
