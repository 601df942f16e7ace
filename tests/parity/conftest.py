"""Fixtures of all parity tests, which say nothing where exact mode does not hold."""

from __future__ import annotations

import pytest

from convoy.errors import SelfCheckError
from convoy.model.backends.host.checks.selfcheck import check_exact
from convoy.model.checkpoints.source import ModelSource


@pytest.fixture(scope="session", autouse=True)
def exact_mode() -> None:
    try:
        check_exact(1)
    except SelfCheckError as error:
        pytest.skip(f"exact mode is refused on this machine: {error.message}")


@pytest.fixture(scope="session")
def demo() -> ModelSource:
    return ModelSource.resolve("demo")
