"""Test the dtype of K/V on a device: that of its activations, and every other one is refused."""

from __future__ import annotations

import pytest

from convoy.config.kernels import CUDA_KERNELS, PLAIN
from convoy.errors import ModelError
from convoy.model.backends.cuda.options import check_kv_dtype


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
@pytest.mark.parametrize("asked", ["f32", "f16", "q8", "fp8"])
def test_a_device_holds_no_kv_but_bfloat16(kernel: str, asked: str) -> None:
    check_kv_dtype(kernel, "auto")
    check_kv_dtype(kernel, "bf16")
    with pytest.raises(
        ModelError, match=f"kv_dtype is {asked}, and a stage on CUDA with {kernel} holds K/V as bf16"
    ):
        check_kv_dtype(kernel, asked)


def test_a_device_that_computes_in_float32_holds_kv_so() -> None:
    check_kv_dtype(PLAIN, "f32")
    with pytest.raises(
        ModelError, match="kv_dtype is bf16, and a stage on CUDA with plain-f32 holds K/V as f32"
    ):
        check_kv_dtype(PLAIN, "bf16")
