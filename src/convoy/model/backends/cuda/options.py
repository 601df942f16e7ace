"""Describe how a stage on a device computes."""

from __future__ import annotations

import atexit
import functools
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from convoy.config.files import keep_kernels_in, named_kernel_folder
from convoy.config.kernels import AUTO, CUDA_KERNEL, CUDA_KERNELS, PLAIN, KernelForm, form_of, kv_form
from convoy.errors import ModelError, SelfCheckError
from convoy.model.kernels.native.build import own_folder

_log = logging.getLogger(__name__)
_FOLDER = "~/.cache/convoy/triton"
KERNEL = CUDA_KERNEL
# Weights and activations in bfloat16, and a file's codes as they are.
BFLOAT16 = form_of(KERNEL)
# For debugging: no rounding to bfloat16, and the library's layers for every family.
CHECK_KERNEL = PLAIN
DTYPES = dict.fromkeys(CUDA_KERNELS, torch.bfloat16) | {CHECK_KERNEL: torch.float32}


@dataclass(frozen=True)
class DeviceOptions:
    """Hold the options of `model.backends.host.stage.StageOptions`, for a device."""

    device: torch.device
    kernel: str
    block_size: int  # tokens
    require_tags: bool
    captured: bool = True
    num_threads: None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of activations and K/V."""
        return DTYPES[self.kernel]

    @property
    def form(self) -> KernelForm:
        """Return the form of weights."""
        return form_of(self.kernel)


def check_kv_dtype(kernel: str, asked: str) -> None:
    """Raise ModelError, with both dtypes, unless a stage on a device holds K/V as ``asked``.

    Its pools have the dtype of its activations, also for debugging.
    """
    own = kv_form(kernel).name
    if asked not in {AUTO, own}:
        raise ModelError(
            f"kv_dtype is {asked}, and a stage on CUDA with {kernel} holds K/V as {own}",
            hint="leave kv_dtype at auto",
        )


@functools.cache
def keep_kernels() -> None:
    """Let Triton keep compiled kernels where no other user can write. Call it before the first launch.

    The kernels run in this process. A folder that the operator named is checked like Convoy's own. Where the
    folder is not safe, kernels are compiled into a new one, which serves this process alone.
    """
    try:
        folder = own_folder(Path(named_kernel_folder() or _FOLDER).expanduser())
        # A umask may let a group write to the folders that Triton makes inside.
        folder.chmod(0o700)
    except (SelfCheckError, RuntimeError) as error:
        folder = Path(tempfile.mkdtemp(prefix="convoy-triton-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        why = error.message if isinstance(error, SelfCheckError) else "this user has no home directory"
        _log.warning("compiled kernels are not kept: %s", why)
    keep_kernels_in(folder)
