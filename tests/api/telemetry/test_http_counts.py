"""Requests are counted by their known path and the status of their answer."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from convoy.api.telemetry.http_counts import HttpCounts


async def answer(request: Request) -> Response:
    raise AssertionError("no route is called")


ROUTES = [Route(path, answer) for path in ("/", "/v1/models", "/v1/models/{name:path}", "/health")]


def call(counts: HttpCounts, path: str, status: int | None, kind: str = "http") -> None:
    """Send one request through ``counts`` to an application that answers with ``status``, or raises."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if status is None:
            raise ConnectionError
        await send({"type": "http.response.start", "status": status})

    async def receive() -> Message:
        raise AssertionError("nothing reads the body")

    async def send(message: Message) -> None:
        assert message["status"] == status

    async def run() -> None:
        await counts.around(app, ROUTES)({"type": kind, "path": path}, receive, send)

    asyncio.run(run())


def counted(counts: HttpCounts) -> dict[tuple[str, str], float]:
    """Return the count of each path and status."""
    (family,) = counts.families()
    return {(one.labels["path"], one.labels["status"]): one.value for one in family.samples}


def test_paths_count_up_to_their_first_parameter_and_unknown_ones_together() -> None:
    counts = HttpCounts()
    for path in ("/v1/models", "/v1/models/a", "/v1/models/b", "/health", "/healthy", "/x", "/"):
        call(counts, path, 200)
    call(counts, "/health", 503)
    assert counted(counts) == {
        ("/v1/models", "200"): 1,
        ("/v1/models/", "200"): 2,
        ("/health", "200"): 1,
        ("/health", "503"): 1,
        ("other", "200"): 2,
        ("/", "200"): 1,
    }


def test_a_request_without_an_answer_counts_as_499() -> None:
    counts = HttpCounts()
    with pytest.raises(ConnectionError):
        call(counts, "/health", None)
    assert counted(counts) == {("/health", "499"): 1}


def test_a_websocket_is_no_http_request() -> None:
    counts = HttpCounts()
    call(counts, "/health", 200, kind="websocket")
    assert counted(counts) == {}
