"""The rows of the kernels: the settings, the forms and the words of --quantize follow from them."""

from __future__ import annotations

from typing import get_args

import pytest

from convoy.config.kernels import (
    AUTO,
    CUDA_FP8,
    CUDA_KERNELS,
    EXACT,
    EXACT_KERNELS,
    FORMS,
    HOST_KERNELS,
    INT8_KERNELS,
    KERNELS,
    KV_FORMS,
    MLX_KERNELS,
    QUANTIZED,
    RequestedKernel,
    RequestedKvDtype,
    form_of,
    held_form,
    host_kernels_text,
    kv_form,
    on_device,
)
from convoy.errors import ModelError


def test_the_settings_name_the_kernels_of_hosts() -> None:
    assert get_args(RequestedKernel) == (AUTO, *HOST_KERNELS, CUDA_FP8)
    assert (
        host_kernels_text()
        == "auto, exact-f32, plain-f32, exact-q8, exact-q4, int8-stored, int8-q8 or int8-q4"
    )


def test_a_kernel_runs_on_hosts_on_cuda_or_on_mlx() -> None:
    assert {*HOST_KERNELS, *CUDA_KERNELS, *MLX_KERNELS} == set(KERNELS)
    names = (*HOST_KERNELS, *CUDA_KERNELS, *MLX_KERNELS)
    assert [on_device(name) for name in names] == [False] * 7 + [True] * 6


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_that_a_row_names_have_rows_of_their_own(name: str) -> None:
    kernel = KERNELS[name]
    assert form_of(name) is kernel.form
    assert {kernel.form.otherwise, kernel.cuda_name} - {""} <= set(FORMS)
    assert not kernel.cuda_name or on_device(kernel.cuda_name)


def test_a_dtype_of_kv_is_a_setting_and_a_kernels_own_is_the_first_that_it_holds() -> None:
    assert get_args(RequestedKvDtype) == (AUTO, *KV_FORMS)
    assert {kv_form(name).name for name in HOST_KERNELS} == {"f32"}
    assert {kv_form(name).name for name in CUDA_KERNELS} == {"bf16"}
    assert [kv_form("exact-f32", name).num_bytes(64) for name in ("f32", "bf16", "f16", "q8")] == [
        *(256, 128, 128, 68)
    ]
    with pytest.raises(ModelError, match="kv_dtype is q8, and cuda-bf16 holds K/V as bf16"):
        kv_form("cuda-bf16", "q8")


def test_a_word_of_quantize_asks_for_a_rounded_kernel() -> None:
    assert QUANTIZED == {"q8": "exact-q8", "q4": "exact-q4"}
    assert {form_of(name).bits for name in QUANTIZED.values()} == {4, 8}
    assert {*QUANTIZED.values(), EXACT} == set(EXACT_KERNELS)
    assert set(INT8_KERNELS).isdisjoint(EXACT_KERNELS)


def test_a_member_that_unpacks_holds_exact_weights_in_another_form_with_the_same_kv() -> None:
    unpacked = {held_form(name, unpacks=True) for name in EXACT_KERNELS}
    for name in EXACT_KERNELS:
        other = held_form(name, unpacks=True)
        assert form_of(name).keeps
        assert form_of(other) == form_of(held_form(EXACT, unpacks=True))
        assert kv_form(other, "q8") == kv_form(name, "q8")
    assert {held_form(name, unpacks=True) for name in KERNELS} == {*KERNELS, *unpacked} - {*EXACT_KERNELS}
    assert {held_form(name, unpacks=False) for name in KERNELS} == set(KERNELS)
