from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.mlx_stages import Loader
from support.tiny_models import Models


@pytest.fixture
def load() -> Iterator[Loader]:
    """Load the stages between cuts; all are given up in the end."""
    loader = Loader()
    yield loader
    loader.give_up()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))
