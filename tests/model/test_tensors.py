"""Between torch and the wire, without a lost bit."""

from __future__ import annotations

import pytest
import torch

from convoy.errors import StepError
from convoy.model.tensors import from_wire, to_wire, tokens_from_bytes
from convoy.wire.tensor import WireTensor


def test_float32_comes_back_bit_for_bit() -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    wire = to_wire(x)
    assert (wire.dtype, wire.shape, len(wire.data)) == ("float32", (3, 8), 96)
    for data in (bytes(wire.data), memoryview(bytearray(wire.data)), memoryview(bytes(wire.data))):
        back = from_wire(WireTensor("float32", (3, 8), data), hidden_size=8, dtype="float32")
        assert back.dtype == torch.float32
        assert torch.equal(back, x)


def test_a_slice_is_sent_as_its_own_rows() -> None:
    x = torch.arange(40.0).view(5, 8)
    assert torch.equal(from_wire(to_wire(x[1::2]), hidden_size=8, dtype="float32"), x[1::2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_two_byte_dtypes_arrive_as_they_are(dtype: str) -> None:
    x = torch.tensor([[1.5, -2.25]])
    wire = to_wire(x, dtype)
    assert (wire.dtype, len(wire.data)) == (dtype, 4)
    back = from_wire(wire, hidden_size=2, dtype=dtype)
    assert back.dtype == getattr(torch, dtype)
    assert torch.equal(back.float(), x)


def test_no_rows_pass() -> None:
    assert from_wire(to_wire(torch.empty(0, 8)), hidden_size=8, dtype="float32").shape == (0, 8)


@pytest.mark.parametrize(
    ("dtype", "shape", "size"),
    [
        ("bfloat16", (1, 8), 16),
        ("float32", (8,), 32),
        ("float32", (1, 7), 28),
        ("float32", (1, 1, 8), 32),
    ],
)
def test_what_does_not_fit_is_refused(dtype: str, shape: tuple[int, ...], size: int) -> None:
    with pytest.raises(StepError):
        from_wire(WireTensor(dtype, shape, bytes(size)), hidden_size=8, dtype="float32")


def test_tokens_are_little_endian_uint32() -> None:
    assert tokens_from_bytes(bytes([1, 0, 0, 0, 255, 255, 255, 255])).tolist() == [1, 2**32 - 1]
    assert tokens_from_bytes(b"").shape == (0,)
    with pytest.raises(StepError, match="multiple of 4"):
        tokens_from_bytes(b"abc")
