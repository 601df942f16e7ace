"""A matrix that is packed slice by slice is, to the byte, the one that oneDNN packs at once."""

from __future__ import annotations

import ctypes

import pytest
import torch

from convoy.model.kernels import packing
from convoy.model.kernels.linear import PackedLinear, packed_available
from convoy.model.kernels.packing import pack_float32

pytestmark = pytest.mark.skipif(not packed_available(), reason="no packed linears in this build of torch")
# (out, in): whole panels and not, a last slice of a few outputs, rows that fill no block of inputs
SHAPES = ((64, 96), (1000, 300), (515, 105), (4099, 64), (128, 2048), (63, 96), (2, 40))


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_LARGE", 0)
    monkeypatch.setattr(packing, "_SLICE", 1)


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
    assert bytes_of(pack_float32(weight)) == bytes_of(at_once(weight))


def test_a_large_matrix_is_never_whole_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, given, pack = stored(1000, 96), [], packing._pack

    def counted(part: torch.Tensor) -> torch.Tensor:
        given.append(len(part))
        return pack(part)

    monkeypatch.setattr(packing, "_pack", counted)
    pack_float32(weight)
    assert given[0] == 1000, "nobody has written to that one"
    assert len(given) > 10
    assert sum(given[1:]) == 1000
    assert max(given[1:]) < 128


def test_what_has_no_places_for_slices_is_packed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = stored(515, 105)
    described = packing._described
    # as if something besides the number of outputs told them apart
    monkeypatch.setattr(packing, "_described", lambda packed: (*described(packed), len(packed)))
    whole = packing._pack(torch.empty(weight.shape))
    assert not packing._has_place(packing._pack(weight[:64].to(torch.float32)), whole)
    assert packing._joined(weight) is None
    assert bytes_of(pack_float32(weight)) == bytes_of(at_once(weight))


def test_halves_of_a_split_linear_are_joined_too() -> None:
    weight, x = stored(200, 512), torch.randn(17, 512)
    found = PackedLinear(weight, None)
    packed = [bytes_of(part) for part in found.packed]
    assert packed == [bytes_of(at_once(half)) for half in (weight[:, :256], weight[:, 256:])]
    assert torch.equal(found.dense()[0], weight.to(torch.float32))
    assert torch.equal(found(x), PackedLinear(weight.to(torch.float32), None)(x))
