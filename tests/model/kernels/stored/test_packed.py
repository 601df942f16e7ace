"""Compiled kernels over stored forms have the bits of the unpacked matrix, for any rows and threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from convoy.config.kernels import KEPT_FORMS
from convoy.model.kernels.native import library
from convoy.model.kernels.stored.linear import StoredLinear, float_linear
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.packed import (
    NativeStored,
    add_in_order,
    failing_forms,
    onednn_holds,
    pack_range,
)
from convoy.model.kernels.stored.sample import sample_range, usual_shape
from support.compiled import faulty
from support.tiny_models import Threads

needs_kernels = pytest.mark.skipif(
    not library.keeps_stored(), reason=f"nothing is compiled here: {library.why_no_native()}"
)
SET_ROWS = (1, 4, 7, 16, 130)
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 121, 600)
# Forms with kernels that unpack in registers, and inputs that fill no step of theirs.
ODD_INPUTS = {
    "BF16": (105, 201),
    "F16": (105, 201),
    "F8_E4M3": (200,),
    **dict.fromkeys(("affine4", "centred4", "centred4 zeros"), (320,)),
}
FUSED = (
    *("BF16", "F16", "affine4", "affine8", "centred4", "centred4 zeros", "centred8", "I8", "F8_E4M3"),
    "MXFP4",
    *(f"gguf:{name}" for name in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "MXFP4")),
    *(f"gguf:{name}" for name in ("Q4_K", "Q5_K", "Q6_K")),
)
TILED = sorted(KEPT_FORMS.difference(FUSED))


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _range(form: str, outputs: int, inputs: int) -> StoredRange:
    """Return random codes and scales."""
    return sample_range(usual_shape(form, inputs), outputs)


def _shapes(form: str) -> Iterator[tuple[int, int]]:
    """Yield outputs and inputs: halves, one run, two runs; then inputs that no block divides."""
    yield from ((70, 256), (130, 768), (64, 1280))
    yield from ((70, inputs) for inputs in ODD_INPUTS.get(form, ()))


@needs_kernels
@pytest.mark.parametrize("form", FUSED)
def test_a_form_has_the_bits_of_its_float32_matrix_for_any_rows_and_threads(
    form: str, threads: Threads
) -> None:
    for outputs, inputs in _shapes(form):
        one = _range(form, outputs, inputs)
        packed = pack_range(one)
        assert packed is not None
        values = one.unpack()
        assert torch.equal(packed.values(slice(0, outputs)), values)
        ids = torch.tensor([outputs - 1, 0, 33])
        assert torch.equal(packed.values(ids), values[ids])
        bias, x = _numbers(outputs, seed=4), _numbers(max(ROWS), inputs, seed=5)
        expected = float_linear(values, bias)(x)
        linear = StoredLinear(StoredMatrix((one,)), bias)
        assert linear.is_compiled
        for count in (1, 2):
            threads(count)
            for rows in ROWS:
                assert torch.equal(linear(x[-rows:]), expected[-rows:]), (outputs, inputs, rows, count)


@needs_kernels
@pytest.mark.parametrize("form", [*FUSED, "F32"])
def test_each_instruction_set_gives_the_bits_of_the_written_order(form: str, threads: Threads) -> None:
    found: dict[str, list[torch.Tensor]] = {}
    # Two parts, and two runs. The outputs fill no vector and no panel.
    for outputs, inputs in ((33, 256), (71, 1280)):
        one = _range(form, outputs, inputs)
        values, bias = one.unpack(), _numbers(outputs, seed=4)
        # With few bits of each input the slow sums are rounded once.
        x = _numbers(max(SET_ROWS), inputs, seed=5).bfloat16().float()
        expected = add_in_order(x, values, bias)
        for name, compiled in _libraries().items():
            packed = pack_range(one, [compiled])
            assert packed is not None, name
            unpacked = packed.values(slice(0, outputs))
            assert torch.equal(unpacked, values), name
            sums = []
            native = NativeStored([(0, packed)], bias)
            for count, rows in zip((1, 1, 1, 2, 2), SET_ROWS, strict=True):
                threads(count)
                y = torch.empty(rows, outputs)
                native(x[:rows], y)
                assert torch.equal(y, expected[:rows]), (name, inputs, rows)
                sums.append(y)
            found.setdefault(name, []).extend((unpacked, *sums))
    first, *others = found.values()
    for other in others:
        # As whole numbers, so that zeros of both signs differ.
        assert all(
            torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(first, other, strict=True)
        )


def _libraries() -> dict[str, library.NativeLibrary]:
    """Return the compiled functions of each instruction set that this machine has."""
    return {one.instruction_set.name: one for one in library.native_libraries()}


@needs_kernels
@pytest.mark.parametrize("form", TILED)
def test_a_form_that_is_unpacked_by_tiles_has_the_bits_of_its_float32_matrix(
    form: str, threads: Threads
) -> None:
    for outputs, inputs in ((70, 256), (33, 1280)):
        one = _range(form, outputs, inputs)
        values, bias, x = one.unpack(), _numbers(outputs, seed=4), _numbers(19, inputs, seed=5)
        expected = float_linear(values, bias)(x)
        for name, compiled in _libraries().items():
            packed = pack_range(one, [compiled])
            assert packed is not None, name
            assert torch.equal(packed.values(slice(0, outputs)), values), name
            ids = torch.tensor([outputs - 1, 0, 32])
            assert torch.equal(packed.values(ids), values[ids]), name
            native = NativeStored([(0, packed)], bias)
            for count, rows in zip((1, 2, 1, 2), (1, 2, 13, 19), strict=True):
                threads(count)
                y = torch.empty(rows, outputs)
                native(x[:rows], y)
                assert torch.equal(y, expected[:rows]), (name, inputs, rows)


@needs_kernels
def test_values_are_rounded_as_an_embedding_that_is_the_output_too() -> None:
    for dtype in ("bfloat16", "float16"):
        one = replace(_range("affine4", 70, 256), rounded=dtype)
        values, x = one.unpack(), _numbers(7, 256, seed=5)
        assert torch.equal(values, values.to(getattr(torch, dtype)).float())
        linear = StoredLinear(StoredMatrix((one,)), None)
        assert linear.is_compiled
        assert torch.equal(linear(x), float_linear(values, None)(x))


@needs_kernels
def test_a_nan_stays_one_where_values_are_rounded_to_two_bytes() -> None:
    one = _range("affine4", 70, 256)
    scales = one.parts["scales"].to(torch.float32)
    # Rounding would carry such bits into the sign.
    scales.view(torch.int32)[3, 0], scales.view(torch.int32)[5, 0] = 0x7FFFFFFF, -1
    for dtype in ("bfloat16", "float16"):
        odd = replace(one, parts={**one.parts, "scales": scales}, rounded=dtype)
        expected = odd.unpack().isnan()
        assert expected.any()
        for offered in library.native_libraries():
            packed = pack_range(odd, [offered])
            assert packed is not None
            assert torch.equal(packed.values(slice(0, 70)).isnan(), expected)


@needs_kernels
@pytest.mark.parametrize("form", [*FUSED, *TILED])
def test_resident_bytes_stay_close_to_the_stored_ones(form: str) -> None:
    one = _range(form, 128, 1024)
    linear = StoredLinear(StoredMatrix((one,)), None)
    assert linear.weight_bytes <= 1.08 * one.num_bytes


def _unread(outputs: int, inputs: int) -> StoredRange:
    """Return a range with scales that no kernel reads."""
    one = _range("centred4", outputs, inputs)
    return replace(one, parts={**one.parts, "scales": one.parts["scales"].double()})


@needs_kernels
def test_ranges_of_several_forms_make_one_linear_with_those_that_no_kernel_knows() -> None:
    forms = {"gguf:Q4_K": 70, "gguf:Q3_K": 40, "gguf:Q6_K": 64, "BF16": 90}
    ranges = [_range(form, outputs, 512) for form, outputs in forms.items()]
    x, bias = _numbers(40, 512, seed=5), _numbers(304, seed=4)
    assert StoredLinear(StoredMatrix(tuple(ranges)), bias[:264]).is_compiled
    matrix = StoredMatrix((*ranges, _unread(40, 512)))
    expected = float_linear(matrix.dense(), bias, "silu")(x)
    linear = StoredLinear(matrix, bias, "silu")
    assert not linear.is_compiled
    for rows in (1, 5, 40):
        assert torch.equal(linear(x[:rows]), expected[:rows])
    assert torch.equal(linear(x[:, None])[:, 0], expected)
    assert torch.equal(linear.dense()[0], matrix.dense())
    ids = torch.tensor([303, 5, 100, 71, 120])
    assert torch.equal(linear.row_values(ids), matrix.row_values(ids))
    linear.leave_native()
    assert torch.equal(linear(x[:1]), expected[:1])
    assert torch.equal(linear(x), expected)


@needs_kernels
def test_a_nan_is_unpacked_by_tiles_and_scales_of_other_types_by_the_reader() -> None:
    nan = _range("F8_E4M3", 70, 256)
    nan.parts["values"].view(torch.uint8)[3, 5] = 0x7F
    packed = pack_range(nan)
    assert packed is not None
    assert torch.equal(packed.values(slice(0, 70)).nan_to_num(7), nan.unpack().nan_to_num(7))
    assert pack_range(_unread(70, 256)) is None


@needs_kernels
def test_a_form_with_other_bits_goes_to_the_next_library_and_at_last_to_the_reader(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert failing_forms() == []
    one, x, right = _range("affine4", 70, 256), _numbers(9, 256, seed=5), list(library.native_libraries())
    wrong, worse = (faulty(one, "convoy_stored_unpack", output=5) for one in (right[0], right[-1]))
    expected = float_linear(one.unpack(), None)(x)
    for offered, is_compiled in (([wrong, right[-1]], True), ([wrong, worse], False)):
        linear = StoredLinear(StoredMatrix((one,)), None, offered=offered)
        assert linear.is_compiled == is_compiled
        assert torch.equal(linear(x), expected)
        # Each is said once, and not for each linear.
        StoredLinear(StoredMatrix((one,)), None, offered=offered)
    assert linear.weight_bytes == one.num_bytes
    first, last = right[0].instruction_set.name, right[-1].instruction_set.name
    assert caplog.messages == [
        f"the compiled code of affine4 for {first} has other bits here, and is not used: "
        f"that of {last} takes its place, and longer",
        f"the compiled code of affine4 for {first} and {last} has other bits here, and is not used: "
        "torch's operators take its place, and longer",
    ]
    assert failing_forms([wrong, worse]) == sorted(KEPT_FORMS)


@needs_kernels
def test_without_onednn_compiled_code_has_the_written_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias, x = _numbers(70, 201), _numbers(70, seed=4), _numbers(40, 201, seed=5).bfloat16().float()
    expected = float_linear(weight, bias)(x)
    monkeypatch.setattr("convoy.model.kernels.stored.packed.packed_available", lambda: False)
    onednn_holds.cache_clear()
    try:
        linear = float_linear(weight, bias)
    finally:
        onednn_holds.cache_clear()
    assert isinstance(linear, StoredLinear)
    assert linear.is_compiled
    assert torch.equal(linear(x), expected)
    assert torch.equal(expected, add_in_order(x, weight, bias))
