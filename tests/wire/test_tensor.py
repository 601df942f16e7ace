from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import FrameError, FrameTooLong
from convoy.wire.tensor import DESCRIPTOR_BYTES, WireTensor, decode_descriptor, encode_descriptor
from support.examples import examples


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [("float32", (3, 5), 60), ("bfloat16", (7,), 14), ("float16", (2, 0), 0), ("float32", (), 4)],
)
def test_a_descriptor_survives_the_way_there_and_back(
    dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    descriptor = encode_descriptor(WireTensor(dtype, shape, bytes(nbytes)))
    assert len(descriptor) == DESCRIPTOR_BYTES
    assert decode_descriptor(descriptor, 1000) == (dtype, shape, nbytes)


@pytest.mark.parametrize(
    ("dtype", "shape", "nbytes"),
    [
        ("float32", (3, 5), 59),
        ("float32", (3, 5), 64),
        ("float64", (1,), 8),
        ("int64", (1,), 8),
        ("float32", (-1, 4), 0),
        ("float32", (1,) * 7, 4),
    ],
)
def test_a_tensor_whose_bytes_do_not_fit_its_shape_cannot_be_made(
    dtype: str, shape: tuple[int, ...], nbytes: int
) -> None:
    with pytest.raises(FrameError):
        WireTensor(dtype, shape, bytes(nbytes))


def test_memory_with_gaps_is_refused() -> None:
    with pytest.raises(FrameError, match="not contiguous"):
        WireTensor("float16", (4,), memoryview(bytes(16))[::2])


def descriptor(number: int, num_dimensions: int, nbytes: int, *sizes: int) -> bytes:
    return struct.pack("<BB6xQ6Q", number, num_dimensions, nbytes, *sizes, *([0] * (6 - len(sizes))))


def test_a_tensor_over_the_limit_is_refused_before_memory_is_taken() -> None:
    with pytest.raises(FrameTooLong, match="claims 4000000000000 bytes"):
        decode_descriptor(descriptor(1, 2, 4 * 10**12, 10**6, 10**6), 256 * 1024 * 1024)


@pytest.mark.parametrize(
    "data",
    [
        descriptor(0, 1, 4, 1),
        descriptor(9, 1, 4, 1),
        descriptor(1, 7, 4, 1),
        descriptor(1, 1, 5, 1),
        descriptor(1, 1, 4, 1, 1),
        descriptor(1, 2, 0, 2**63, 2),
        descriptor(1, 1, 4, 1)[:2] + b"\0\0\0\0\0\1" + descriptor(1, 1, 4, 1)[8:],
        b"",
        bytes(63),
    ],
)
def test_a_malformed_descriptor_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode_descriptor(data, 2**70)


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(min_size=DESCRIPTOR_BYTES, max_size=DESCRIPTOR_BYTES))
def test_garbage_is_never_more_than_a_frame_error(garbage: bytes) -> None:
    try:
        _, _, nbytes = decode_descriptor(garbage, 1 << 20)
    except FrameError:
        return
    assert nbytes <= 1 << 20
