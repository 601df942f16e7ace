"""Fixtures of the kernels on a device. Everything here is skipped, with the reason, where there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support.kernels import why_not


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def device() -> torch.device:
    """Return a CUDA device, or the host where Triton's interpreter stands in for one."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
