"""A matrix that is packed slice by slice is, to the byte, the one that oneDNN packs at once."""

from __future__ import annotations

import ctypes

import pytest
import torch

from convoy.model.kernels.linear import PackedLinear, packed_available
from convoy.model.kernels.packing import pack_float32

pytestmark = pytest.mark.skipif(not packed_available(), reason="no packed linears in this build of torch")
# (out, in): whole panels and not, a last slice of a few outputs, rows that fill no block of inputs
SHAPES = ((64, 96), (1000, 300), (515, 105), (4099, 64), (128, 2048), (63, 96), (2, 40))


def pack_slices(weight: torch.Tensor) -> torch.Tensor:
    """Pack as a large matrix, in the smallest slices."""
    return pack_float32(weight, large_bytes=0, slice_bytes=1)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of outputs of each matrix that oneDNN packs."""
    numbers: list[int] = []
    pack = torch.ops.mkldnn._reorder_linear_weight

    def counted(part: torch.Tensor, num_rows: int) -> torch.Tensor:
        numbers.append(len(part))
        packed: torch.Tensor = pack(part, num_rows)
        return packed

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", counted)
    return numbers


def stored(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(20)).to(torch.bfloat16)


def at_once(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.to(torch.float32).contiguous(), 256)
    return packed


def bytes_of(packed: torch.Tensor) -> bytes:
    return ctypes.string_at(torch.ops.mkldnn.data_ptr(packed), torch.ops.mkldnn._nbytes(packed))


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_slices_joined_are_the_matrix_packed_at_once(outputs: int, inputs: int) -> None:
    weight = stored(outputs, inputs)
    assert bytes_of(pack_slices(weight)) == bytes_of(at_once(weight))


def test_a_large_matrix_is_never_whole_in_float32(given: list[int]) -> None:
    pack_slices(stored(1000, 96))
    assert given[0] == 1000, "nobody has written to that one"
    assert len(given) > 10
    assert sum(given[1:]) == 1000
    assert max(given[1:]) < 128


def test_what_has_no_places_for_slices_is_packed_at_once(
    monkeypatch: pytest.MonkeyPatch, given: list[int]
) -> None:
    weight = stored(515, 105)
    described = torch.ops.mkldnn._get_mkldnn_serialized_md

    # as if something besides the number of outputs told them apart
    def described_by_more(packed: torch.Tensor) -> torch.Tensor:
        more = torch.tensor([len(packed)], dtype=torch.int32).view(torch.uint8)
        return torch.cat([more, described(packed)])

    monkeypatch.setattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md", described_by_more)
    packed = pack_slices(weight)
    assert given[0] == 515, "nobody has written to that one"
    assert given[-1] == 515
    assert len(given) == 3, "the first slice has no place"
    assert bytes_of(packed) == bytes_of(at_once(weight))


def test_halves_of_a_split_linear_are_joined_too(monkeypatch: pytest.MonkeyPatch, given: list[int]) -> None:
    weight, x = stored(1000, 512), torch.randn(17, 512)
    with monkeypatch.context() as large:
        large.setattr("convoy.model.kernels.linear.pack_float32", pack_slices)
        found = PackedLinear(weight, None)
    assert given.count(1000) == 2, "memory for each half, and then its slices"
    assert len(given) > 20
    packed = [bytes_of(part) for part in found.packed]
    assert packed == [bytes_of(at_once(half)) for half in (weight[:, :256], weight[:, 256:])]
    assert torch.equal(found.dense()[0], weight.to(torch.float32))
    assert torch.equal(found(x), PackedLinear(weight.to(torch.float32), None)(x))
