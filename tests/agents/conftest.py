"""The place where agents run: a network namespace with loopback alone, and folders for any user.

`enter.sh` makes it, so these tests run as ``make test-agents``.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents.names import NameServer


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--agents-place", type=Path, help="the folder that tests/agents/enter.sh makes")


@pytest.fixture(scope="session")
def place(request: pytest.FixtureRequest) -> Path:
    given: Path | None = request.config.getoption("--agents-place")
    assert given is not None, "agents run in a network of their own: make test-agents"
    # An address for documentation (RFC 5737), which a machine with any way out would try to reach.
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside,
        pytest.raises(OSError, match="unreachable"),
    ):
        outside.connect(("192.0.2.1", 9))
    return given


@pytest.fixture(scope="session")
def names(place: Path) -> Iterator[NameServer]:
    server = NameServer()
    try:
        with pytest.raises(socket.gaierror):
            socket.getaddrinfo("agents.example", 443)
        assert "agents.example" in server.take()
        yield server
    finally:
        server.close()
