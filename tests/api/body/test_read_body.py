"""Bodies on the wire: which refusal each one gets, and when."""

from __future__ import annotations

import asyncio

import pytest
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from convoy.api.body.intake import Intake
from convoy.api.body.read_body import read_body
from convoy.api.listen.options import ServeOptions
from convoy.api.refusals import BodyTooSlow
from convoy.errors import QueueFull

LONG = 300 * 1024
NUM_PLACES = 8


def parts(*data: bytes) -> Receive:
    """Return a client that sends ``data`` and then nothing, without an end."""
    left = list(data)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": left.pop(0), "more_body": True}

    return receive


@pytest.mark.parametrize("length", [None, LONG])
def test_a_long_body_without_a_place_is_told_that_the_queue_is_full(length: int | None) -> None:
    headers = Headers({} if length is None else {"content-length": str(length)})

    async def scene() -> None:
        intake = Intake(ServeOptions(body_timeout_s=0.05))
        for _ in range(NUM_PLACES):
            await intake.upload().reserve(LONG)
        options = ServeOptions(body_timeout_s=0.05)
        with pytest.raises(QueueFull, match="too many long prompts"):
            await read_body(headers, parts(bytes(LONG)), options, upload=intake.upload())

    asyncio.run(scene())


@pytest.mark.parametrize("chunked", [False, True])
def test_a_long_body_that_stops_soon_loses_its_place(chunked: bool) -> None:
    options = ServeOptions(body_timeout_s=600.0, body_grace_s=0.01, min_body_bytes_per_s=10**9)
    headers = Headers({} if chunked else {"content-length": str(LONG)})
    begun = bytes(LONG) if chunked else b"x"

    async def scene() -> None:
        upload = Intake(ServeOptions()).upload("one")
        with pytest.raises(BodyTooSlow, match="bytes a second"):
            async with asyncio.timeout(60.0):
                await read_body(headers, parts(begun), options, upload=upload)

    asyncio.run(scene())


def test_a_short_body_has_its_whole_time() -> None:
    sent = asyncio.Event()
    messages = parts(b"a")

    async def receive() -> Message:
        if not sent.is_set():
            return await messages()
        return {"type": "http.request", "body": b"b", "more_body": False}

    async def slowly() -> Message:
        message = await receive()
        sent.set()
        # Past the deadline that a long body would have.
        for _ in range(3):
            await asyncio.sleep(0.001)
        return message

    async def scene() -> bytes:
        return await read_body(Headers({}), slowly, ServeOptions(), upload=Intake(ServeOptions()).upload())

    assert asyncio.run(scene()) == b"ab"
