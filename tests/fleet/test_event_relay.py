"""What a relay sends to a client, and what it never does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Message

from convoy.api.exchange import Exchange
from convoy.errors import ProviderError, Unavailable
from convoy.fleet.apis.table import APIS
from convoy.fleet.event_relay import MAX_RELAYED_BYTES, EventRelay
from convoy.wire.fleet.messages import Kind
from support.response_events import parse_response_stream

EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
CREATED = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0,"response":'
    b'{"id":"resp_engine","created_at":1,"model":"m","object":"response","output":[],'
    b'"parallel_tool_calls":true,"tool_choice":"auto","tools":[]}}\n\n'
)


class Client:
    """Read all of an exchange as its client."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.exchange = Exchange(self._receive, self._send, 10.0)

    async def _receive(self) -> Message:
        raise AssertionError("nothing is read")

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


def relayed(
    kind: Kind,
    scene: Callable[[EventRelay, Client], Awaitable[Any]],
    max_event_bytes: int = MAX_RELAYED_BYTES,
) -> Client:
    """Return a client after ``scene``. The relay is silent for a minute, so nothing is added."""

    async def run() -> Client:
        client = Client()
        relay = EventRelay(client.exchange, APIS[kind].form("m"), 60.0, max_event_bytes=max_event_bytes)
        async with relay.kept_alive():
            await scene(relay, client)
        return client

    return asyncio.run(run())


def test_an_event_is_sent_once_it_is_complete_and_half_of_one_never() -> None:
    async def scene(relay: EventRelay, client: Client) -> None:
        await relay.begin(200, EVENTS)
        for byte in b'data: {"id":"a"}\n\ndata: {':
            await relay.send(bytes([byte]))
        assert client.body == b'data: {"id":"a"}\n\n'
        await relay.end(b": done\n\n")

    assert relayed("chat", scene).body == b'data: {"id":"a"}\n\n: done\n\n'


def test_an_event_without_an_end_is_not_held_for_ever() -> None:
    async def scene(relay: EventRelay, _: Client) -> None:
        await relay.begin(200, EVENTS)
        with pytest.raises(ProviderError, match="more than 100 bytes"):
            await relay.send(b"data: " + b"x" * 100)

    relayed("messages", scene, max_event_bytes=100)


LAST_EVENTS: list[tuple[Kind, bytes]] = [
    ("chat", b"data: [DONE]\n\n"),
    ("completion", b"data: [DONE]\n\n"),
    ("messages", b'event: message_stop\ndata: {"type":"message_stop"}\n\n'),
    ("responses", b'event: response.completed\ndata: {"type":"response.completed","sequence_number":0}\n\n'),
    (
        "responses",
        b'event: response.incomplete\ndata: {"type":"response.incomplete","sequence_number":0}\n\n',
    ),
    ("responses", b'event: response.failed\ndata: {"type":"response.failed","sequence_number":0}\n\n'),
]


@pytest.mark.parametrize(("kind", "last"), LAST_EVENTS)
def test_the_last_event_waits_for_the_end_of_the_answer(kind: Kind, last: bytes) -> None:
    async def scene(relay: EventRelay, client: Client) -> None:
        await relay.begin(200, EVENTS)
        await relay.send(b"data: {}\n\n" + last)
        assert client.body == b"data: {}\n\n"
        await relay.end(b": done\n\n")

    assert relayed(kind, scene).body == b"data: {}\n\n" + last + b": done\n\n"


def test_an_answer_that_breaks_after_its_last_event_has_none() -> None:
    async def scene(relay: EventRelay, _: Client) -> None:
        await relay.begin(200, EVENTS)
        await relay.send(b"data: [DONE]\n\n")
        await relay.fail(b"data: {}\n\n")

    assert relayed("chat", scene).body == b"data: {}\n\n"


def test_an_event_after_the_last_one_is_sent_after_it() -> None:
    async def scene(relay: EventRelay, client: Client) -> None:
        await relay.begin(200, EVENTS)
        await relay.send(b"data: [DONE]\n\ndata: {}\n\n")
        assert client.body == b"data: [DONE]\n\ndata: {}\n\n"
        await relay.end()

    relayed("chat", scene)


def test_an_answer_without_events_passes_as_it_is() -> None:
    async def scene(relay: EventRelay, _: Client) -> None:
        await relay.begin(200, {"content-type": "application/json"})
        await relay.send(b'{"a":')
        await relay.send(b"1}")
        await relay.end()

    assert relayed("chat", scene).body == b'{"a":1}'


def test_a_response_that_breaks_fails_under_the_id_that_the_client_knows() -> None:
    async def scene(relay: EventRelay, client: Client) -> None:
        await relay.begin(200, EVENTS)
        await relay.send(CREATED)
        await client.exchange.send_events(client.exchange.failure(Unavailable("x", public="it broke")))

    events = parse_response_stream(relayed("responses", scene).body.decode())
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert {event["response"]["id"] for event in events} == {"resp_engine"}
    assert events[-1]["response"]["error"]["message"] == "it broke"


def test_a_refusal_before_any_event_keeps_its_status() -> None:
    async def scene(relay: EventRelay, _: Client) -> None:
        await relay.complete(400, {"content-type": "application/json"}, b'{"error":{"code":"x"}}')

    client = relayed("responses", scene)
    assert (client.status, client.body) == (400, b'{"error":{"code":"x"}}')


@pytest.mark.parametrize("data", [b"[DONE]", b"{", b"[1]", b'{"type":7}', b'{"type":"a\\nb","response":{}}'])
def test_an_event_that_is_none_of_the_api_is_passed_on_as_it_is(data: bytes) -> None:
    async def scene(relay: EventRelay, _: Client) -> None:
        await relay.begin(200, EVENTS)
        await relay.send(b"data: " + data + b"\n\n")
        await relay.end()

    assert relayed("responses", scene).body == b"data: " + data + b"\n\n"
