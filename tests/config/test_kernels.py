"""The rows of the kernels: the settings, the forms and the words of --quantize follow from them."""

from __future__ import annotations

from typing import get_args

import pytest

from convoy.config.kernels import (
    AUTO,
    CUDA_KERNELS,
    HOST_KERNELS,
    KERNELS,
    QUANTIZED,
    ROUNDED,
    RequestedKernel,
    form_of,
    host_kernels_text,
    on_device,
)


def test_the_settings_name_the_kernels_of_hosts() -> None:
    assert get_args(RequestedKernel) == (AUTO, *HOST_KERNELS)
    assert host_kernels_text() == "auto, exact-f32, plain-f32, w8a8 or w4a16"


def test_a_kernel_runs_on_hosts_or_on_cuda() -> None:
    assert set(HOST_KERNELS) | set(CUDA_KERNELS) == set(KERNELS)
    assert [on_device(name) for name in (*HOST_KERNELS, *CUDA_KERNELS)] == [False] * 4 + [True] * 3


@pytest.mark.parametrize("name", KERNELS)
def test_the_kernels_that_a_row_names_have_rows_of_their_own(name: str) -> None:
    kernel = KERNELS[name]
    assert form_of(name) is kernel.form
    assert {kernel.form.otherwise, kernel.cuda_name} - {""} <= set(KERNELS)
    assert not kernel.cuda_name or on_device(kernel.cuda_name)


def test_a_word_of_quantize_asks_for_a_rounded_kernel() -> None:
    assert QUANTIZED == {"int8": "w8a8", "int4": "w4a16"}
    assert set(QUANTIZED.values()) == set(ROUNDED)
