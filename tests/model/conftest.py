"""Fixtures of the model room."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from support.odd_hub import hub, manifest, model

# A process that only shares tests out imports this file as well. PyTorch and transformers take seconds.
if TYPE_CHECKING:
    from support.tiny_models import Models, Prompt, Threads

__all__ = ["hub", "manifest", "model"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    from support.tiny_models import Models

    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture
def prompt() -> Prompt:
    """Give prompt(n, seed): n token ids below 105."""
    import torch

    def make(num_tokens: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, 105, (num_tokens,), generator=generator).tolist()

    return make


@pytest.fixture(autouse=True)
def threads() -> Iterator[Threads]:
    """Give threads(n), which sets torch's thread count; it is put back after the test."""
    import torch

    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
