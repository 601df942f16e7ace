"""One server for the tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import httpx
import pytest

# Every test process imports this file. The clients take seconds, and few files need them.
if TYPE_CHECKING:
    from anthropic import Anthropic
    from openai import OpenAI

    from support.fake_service import Running


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.outside)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    from support.fake_service import serving

    with serving() as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="session")
def openai(server: Running) -> Iterator[OpenAI]:
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60.0) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic(server: Running) -> Iterator[Anthropic]:
    from anthropic import Anthropic

    with Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=60.0) as client:
        yield client
