"""Test the dtype of K/V on a device, and the folder of its compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from convoy.config.kernels import CUDA_KERNELS, PLAIN
from convoy.errors import ModelError
from convoy.model.backends.cuda.options import check_kv_dtype, keep_kernels


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


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", "")
    keep_kernels.cache_clear()
    return tmp_path


def test_compiled_kernels_are_kept_in_a_folder_of_this_user(home: Path) -> None:
    keep_kernels()
    own = home / ".cache/convoy/triton"
    assert os.environ["TRITON_CACHE_DIR"] == str(own)
    assert own.stat().st_mode & 0o777 == 0o700


def test_compiled_kernels_are_kept_in_the_folder_that_the_operator_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(home / "named"))
    (home / "named").mkdir(mode=0o755)
    keep_kernels()
    assert os.environ["TRITON_CACHE_DIR"] == str(home / "named")
    # Nobody else reaches the folders that Triton makes inside, whatever the umask.
    assert (home / "named").stat().st_mode & 0o777 == 0o700


def test_no_kernel_is_taken_from_a_folder_that_others_can_write_to(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = home / ".cache/convoy/triton"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    keep_kernels()
    chosen = Path(os.environ["TRITON_CACHE_DIR"])
    assert chosen != shared
    assert chosen.stat().st_mode & 0o777 == 0o700
    assert f"compiled kernels are not kept: others may write to {shared}" in caplog.text
    chosen.rmdir()
