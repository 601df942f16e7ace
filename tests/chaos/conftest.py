"""How long, and which disorder: ``make test-chaos SECONDS=60 SEED=7``."""

from __future__ import annotations

import secrets

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos-seconds", type=float, default=600.0, help="how long members are disturbed")
    parser.addoption("--chaos-seed", type=int, default=None, help="of the disorder; drawn and printed")


@pytest.fixture(scope="session")
def chaos_seconds(request: pytest.FixtureRequest) -> float:
    seconds: float = request.config.getoption("--chaos-seconds")
    return seconds


@pytest.fixture(scope="session")
def chaos_seed(request: pytest.FixtureRequest) -> int:
    seed: int | None = request.config.getoption("--chaos-seed")
    return secrets.randbelow(1_000_000) if seed is None else seed
