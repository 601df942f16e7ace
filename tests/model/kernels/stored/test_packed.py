"""Compiled kernels over stored forms have the bits of the unpacked matrix, for any rows and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from convoy.config.kernels import KEPT_FORMS
from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.native import library
from convoy.model.kernels.stored.linear import StoredLinear
from convoy.model.kernels.stored.matrix import StoredMatrix, StoredRange
from convoy.model.kernels.stored.packed import NativeStored, failing_forms, kernel_holds, pack_range
from support.tiny_models import Threads

needs_native = pytest.mark.skipif(
    library.native_library() is None, reason=f"nothing is compiled here: {library.why_no_native()}"
)
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 121, 600)
# Bytes of a block of 32 or 256 inputs, and where its halves lie.
RAW = {
    "gguf:Q8_0": (32, 34, (0,)),
    "gguf:Q4_0": (32, 18, (0,)),
    "gguf:Q4_1": (32, 20, (0, 2)),
    "gguf:IQ4_NL": (32, 18, (0,)),
    "gguf:Q4_K": (256, 144, (0, 2)),
    "gguf:Q6_K": (256, 210, (208,)),
    "gguf:Q5_0": (32, 22, (0,)),
    "gguf:Q5_1": (32, 24, (0, 2)),
    "gguf:Q5_K": (256, 176, (0, 2)),
    "gguf:Q2_K": (256, 84, (80, 82)),
    "gguf:MXFP4": (32, 17, ()),
}
FORMS = (
    *("BF16", "F16", "affine4", "affine8", "centred4", "zeroed4", "centred8", "I8", "F8_E4M3", "MXFP4"),
    *(form for form in RAW if form != "gguf:Q2_K"),
)


def _numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _bytes(*shape: int, low: int = 0, high: int = 256) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=generator)


def _range(form: str, outputs: int, inputs: int) -> StoredRange:
    """Return random codes and scales."""
    if form in RAW:
        block, size, halves = RAW[form]
        raw = _bytes(outputs, inputs // block, size)
        for place in halves:
            half = _numbers(outputs, inputs // block, seed=place).to(torch.float16).unsqueeze(-1)
            raw[..., place : place + 2] = half.view(torch.uint8)
        if not halves:
            raw[..., 0] = raw[..., 0].clamp(100, 150)
        return StoredRange(form, outputs, inputs, {"stored": raw.flatten(1)})
    return StoredRange(form.replace("zeroed", "centred"), outputs, inputs, *_parts(form, outputs, inputs))


def _parts(form: str, outputs: int, inputs: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the parts of a form that is none of ggml's, and the inputs of a group."""
    groups, bits = -(-inputs // 64), 8 if form.endswith("8") else 4
    scales, codes = _numbers(outputs, groups, seed=1), _bytes(outputs, inputs * bits // 8)
    values = _numbers(outputs, inputs)
    e4m3 = _bytes(outputs, inputs, high=127).view(torch.float8_e4m3fn)
    powers = _bytes(outputs, -(-inputs // 32), low=100, high=150)
    special: dict[str, tuple[dict[str, torch.Tensor], int]] = {
        "BF16": ({"values": values.bfloat16()}, 0),
        "F16": ({"values": values.half()}, 0),
        "I8": ({"values": codes.view(torch.int8), "scales": scales[:, :1]}, 0),
        "F8_E4M3": ({"values": e4m3, "scales": scales}, 64),
        "MXFP4": ({"codes": codes, "scales": powers}, 32),
        "zeroed4": (
            {"codes": codes, "scales": scales.half(), "zeros": _bytes(outputs, groups, high=16)},
            64,
        ),
    }
    if form.startswith("affine"):
        return {"codes": codes, "scales": scales.bfloat16(), "biases": scales.flip(1).bfloat16()}, 64
    return special.get(form, ({"codes": codes, "scales": scales}, 64))


def _shapes(form: str) -> Iterator[tuple[int, int]]:
    """Yield outputs and inputs: halves, one run, two runs; then inputs that no block divides."""
    yield from ((70, 256), (130, 768), (64, 1280))
    if form in {"BF16", "F16"}:
        yield from ((40, 105), (70, 201))
    if form.endswith("4") and form.startswith(("affine", "centred")):
        yield (70, 320)
    if form == "F8_E4M3":
        yield (70, 200)


@needs_native
@pytest.mark.parametrize("form", FORMS)
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
        expected = PackedLinear(values, bias)(x)
        linear = StoredLinear(StoredMatrix((one,)), bias)
        assert linear.is_compiled
        for count in (1, 2):
            threads(count)
            for rows in ROWS:
                assert torch.equal(linear(x[-rows:]), expected[-rows:]), (outputs, inputs, rows, count)


def test_plans_count_the_forms_that_are_multiplied_here() -> None:
    assert {form.replace("zeroed4", "centred4 zeros") for form in FORMS} - KEPT_FORMS == {"gguf:MXFP4"}
    assert {form.replace("zeroed4", "centred4 zeros") for form in FORMS} >= KEPT_FORMS


@needs_native
@pytest.mark.parametrize("form", [*FORMS, "gguf:Q2_K"])
def test_resident_bytes_stay_close_to_the_stored_ones(form: str) -> None:
    one = _range(form, 128, 1024)
    linear = StoredLinear(StoredMatrix((one,)), None)
    assert linear.weight_bytes <= 1.08 * one.num_bytes


@needs_native
def test_ranges_of_several_forms_make_one_linear_with_those_that_no_kernel_knows() -> None:
    forms = {"gguf:Q4_K": 70, "gguf:Q2_K": 40, "gguf:Q6_K": 64, "BF16": 130}
    matrix = StoredMatrix(tuple(_range(form, outputs, 512) for form, outputs in forms.items()))
    bias, x = _numbers(304, seed=4), _numbers(40, 512, seed=5)
    expected = PackedLinear(matrix.dense(), bias, "silu")(x)
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


@needs_native
def test_numbers_that_no_kernel_reads_are_left_to_the_reader() -> None:
    nan = _range("F8_E4M3", 70, 256)
    nan.parts["values"].view(torch.uint8)[3, 5] = 0x7F
    assert pack_range(nan) is None
    codes, groups = _range("centred4", 70, 256).parts, torch.arange(256) // 64
    assert pack_range(StoredRange("centred4", 70, 256, {**codes, "places": groups}, 64)) is None
    assert (
        pack_range(StoredRange("centred4", 70, 256, {**codes, "scales": codes["scales"].double()}, 64))
        is None
    )


@needs_native
def test_a_form_with_other_bits_here_is_named_and_unpacked_some_outputs_at_a_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert failing_forms() == []
    one, right = _range("affine4", 70, 256), NativeStored.__call__

    def wrong(native: NativeStored, x: torch.Tensor, y: torch.Tensor) -> None:
        right(native, x, y)
        y.add_(1)

    try:
        with monkeypatch.context() as patched:
            patched.setattr(NativeStored, "__call__", wrong)
            kernel_holds.cache_clear()
            assert failing_forms() == sorted(KEPT_FORMS)
            linear = StoredLinear(StoredMatrix((one,)), None)
    finally:
        kernel_holds.cache_clear()
    assert "the compiled kernel of affine4 has other bits here, and is not used" in caplog.text
    assert not linear.is_compiled
    assert linear.weight_bytes == one.num_bytes
    x = _numbers(9, 256, seed=5)
    assert torch.equal(linear(x), PackedLinear(one.unpack(), None)(x))
