"""Fixtures of one odd model: its directory, its manifest, and a hub on loopback that has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.model.checkpoints.manifest import Manifest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.store.digests import Hashing, make_manifest
from support.fake_hub import FakeHub


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model's directory, which no test changes."""
    from support.odd_models import make_odd_llama

    return make_odd_llama(tmp_path_factory.mktemp("model") / "odd")


@pytest.fixture(scope="session")
def manifest(model: Path) -> Manifest:
    return make_manifest(ModelSource.resolve(str(model)), Hashing())


@pytest.fixture
def hub(model: Path, tmp_path: Path) -> Iterator[FakeHub]:
    """Serve a copy of the model, which a test may change."""
    fake = FakeHub(shutil.copytree(model, tmp_path / "served"))
    yield fake
    fake.close()
