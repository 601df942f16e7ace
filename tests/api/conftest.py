"""One server for the tests that only ask it things."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from support.fake_service import Running, serving


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "server" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.outside)


@pytest.fixture(scope="session")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=20.0) as client:
        yield client


@pytest.fixture(scope="session")
def openai(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20.0) as client:
        yield client


@pytest.fixture(scope="session")
def anthropic(server: Running) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=20.0) as client:
        yield client
