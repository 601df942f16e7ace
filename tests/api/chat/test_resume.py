"""Streams with a broken connection, which a client resumes with the id of the last event it got."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from starlette.types import Message

from convoy.api.chat.generate import Generate
from convoy.api.chat.resume import KeptStream, KeptStreams
from convoy.api.exchange import Exchange
from convoy.api.keys.keys import KeyRing, anyone
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ResumeOptions, ServeOptions
from convoy.api.refusals import RateLimited, StreamTaken, UnknownStream
from convoy.errors import StageLost
from convoy.testing import Cut, serve
from support.fake_service import REPLY, Running, events, serving
from support.waiting import wait_until

TEXT = "/v1/completions"
CHAT = {"messages": [{"role": "user", "content": "a"}], "stream": True}
BODIES: dict[str, dict[str, Any]] = {
    TEXT: {"prompt": "a", "stream": True},
    "/v1/chat/completions": {**CHAT, "stream_options": {"include_usage": True}},
    "/v1/messages": {**CHAT, "max_tokens": 100},
    "/v1/responses": {"input": "a", "stream": True},
}
ASKED = {"convoy-resumable": "true"}
KEYS = {"ann": "the-secret-key-of-ann", "bob": "the-secret-key-of-bob"}
WAIT_S = 20.0


@dataclass
class Deadline:
    """Let a test pass a deadline by hand."""

    asked_s: list[float] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)

    async def sleep(self, seconds: float) -> None:
        self.asked_s.append(seconds)
        self.begun.set()
        while not self.over.is_set():
            await asyncio.sleep(0.01)


def options_of(deadline: Deadline, **more: Any) -> ServeOptions:
    return ServeOptions(port=0, drain_s=5.0, resume=ResumeOptions(sleep=deadline.sleep), **more)


@contextmanager
def begun(running: Running, path: str = TEXT, **headers: str) -> Iterator[bytes]:
    """Yield the first three events of a stream, with its connection open until the block ends."""
    body = BODIES[path]
    with httpx.stream("POST", running.url + path, json=body, headers={**ASKED, **headers}) as answer:
        data = b""
        for piece in answer.iter_raw():
            data += piece
            if data.count(b"\n\n") >= 3:
                break
        assert data.endswith(b"\n\n"), "an event is sent whole"
        yield data


def resume(running: Running, path: str, last: str, **headers: str) -> httpx.Response:
    headers = {"last-event-id": last, **headers}
    return httpx.post(running.url + path, headers=headers, timeout=WAIT_S)


def ids_of(data: bytes) -> list[str]:
    return re.findall(r"^id: (.*)$", data.decode(), re.MULTILINE)


def data_of(data: bytes) -> list[Any]:
    return events(re.sub(r"(?m)^id: .*\n", "", data.decode()))


def text_of(data: bytes) -> str:
    """Return the text of a complete stream of a completion."""
    found = data_of(data)
    assert found.pop() == "[DONE]"
    return "".join(event["choices"][0]["text"] for event in found)


@pytest.mark.parametrize("path", BODIES)
def test_the_rest_of_a_broken_stream_is_the_same_bytes(path: str) -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        running.engine.pause_after = 3
        with begun(running, path) as first:
            assert running.engine.paused.wait(WAIT_S)
        assert deadline.begun.wait(WAIT_S)
        running.engine.go.set()
        # The generation goes on without a connection.
        assert running.engine.handles[0].done.wait(WAIT_S)
        seen = ids_of(first)
        rest = resume(running, path, seen[-1])
        assert rest.headers["content-type"].startswith("text/event-stream")
        again = resume(running, path, seen[-1])
        behind_the_first = resume(running, path, seen[0])
        whole = first + rest.content
        assert again.content == rest.content
        assert whole.endswith(behind_the_first.content)
        assert whole.removesuffix(behind_the_first.content).count(b"\n\n") == 1
        name = seen[0].rpartition("-")[0]
        assert ids_of(whole) == [f"{name}-{number}" for number in range(whole.count(b"\n\n"))]
        assert resume(running, path, ids_of(whole)[-1]).content == b""
        assert not running.engine.handles[0].aborted.is_set()
        assert len(running.engine.handles) == 1
        plain = httpx.post(running.url + path, json=BODIES[path], timeout=WAIT_S).content
    kinds = re.findall(rb"^event: .*$", plain, re.MULTILINE)
    assert re.findall(rb"^event: .*$", whole, re.MULTILINE) == kinds
    assert plain.count(b"\n\n") == whole.count(b"\n\n")
    assert b"id: " not in plain, "a stream has ids only if it can be resumed"
    assert deadline.asked_s[0] == 60.0


def test_a_stream_is_resumed_while_it_runs_and_a_second_time() -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        running.engine.pause_after = 3
        with begun(running) as first:
            pass
        last = ids_of(first)[-1]
        for _ in range(2):
            with httpx.stream("POST", running.url + TEXT, headers={"last-event-id": last}) as answer:
                assert answer.status_code == 200
        running.engine.go.set()
        rest = resume(running, TEXT, last)
    assert text_of(first + rest.content) == REPLY


def test_a_newer_connection_takes_the_stream_over() -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        running.engine.pause_after = 3
        body, url = BODIES[TEXT], running.url + TEXT
        with httpx.stream("POST", url, json=body, headers=ASKED, timeout=WAIT_S) as older:
            pieces = older.iter_raw()
            first = next(pieces)
            assert running.engine.paused.wait(WAIT_S)
            again = {"last-event-id": ids_of(first)[0]}
            newer: list[httpx.Response] = []

            def follow() -> None:
                newer.append(httpx.post(url, headers=again, timeout=WAIT_S))

            thread = threading.Thread(target=follow)
            thread.start()
            left = b"".join(pieces)
            running.engine.go.set()
            thread.join(WAIT_S)
        assert events(left.decode())[-1]["error"]["code"] == "stream_taken"
        assert newer[0].content.endswith(b"data: [DONE]\n\n")
        assert not running.engine.handles[0].aborted.is_set()


def test_after_the_deadline_the_generation_is_aborted_and_nothing_is_kept() -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        running.engine.pause_after = 3
        with begun(running) as first:
            assert running.engine.paused.wait(WAIT_S)
        assert deadline.begun.wait(WAIT_S)
        assert not running.engine.handles[0].aborted.is_set()
        deadline.over.set()
        assert running.engine.handles[0].aborted.wait(WAIT_S)
        late = resume(running, TEXT, ids_of(first)[-1])
        assert (late.status_code, late.json()["error"]["code"]) == (404, "stream_not_found")


def test_a_complete_stream_is_kept_until_the_deadline() -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        whole = httpx.post(running.url + TEXT, json=BODIES[TEXT], headers=ASKED, timeout=WAIT_S).content
        assert deadline.begun.wait(WAIT_S)
        seen = ids_of(whole)
        assert whole.endswith(resume(running, TEXT, seen[0]).content)
        deadline.over.set()
        wait_until(lambda: resume(running, TEXT, seen[0]).status_code != 200)
        assert resume(running, TEXT, seen[0]).status_code == 404


def test_without_the_header_a_closed_connection_aborts() -> None:
    with serving(options=options_of(Deadline())) as running:
        running.engine.pause_after = 3
        with begun(running, **{"convoy-resumable": "false"}) as first:
            assert ids_of(first) == []
        assert running.engine.handles[0].aborted.wait(WAIT_S)


def test_a_client_that_leaves_before_the_first_event_aborts() -> None:
    with serving(options=options_of(Deadline(), heartbeat_s=60.0)) as running:
        running.engine.pause_after = 0
        url = httpx.URL(running.url)
        client = http.client.HTTPConnection(url.host, url.port, timeout=WAIT_S)
        # The call returns once the request is written. No byte of an answer comes before the first token.
        headers = {**ASKED, "content-type": "application/json"}
        client.request("POST", TEXT, body=json.dumps(BODIES[TEXT]), headers=headers)
        assert running.engine.admitted.wait(WAIT_S)
        client.close()
        assert running.engine.handles[0].aborted.wait(WAIT_S)


def test_a_failure_while_no_client_is_there_ends_the_resumed_stream() -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        running.engine.pause_after = 3
        running.engine.fail_after = 3
        running.engine.error = StageLost("beta is gone", public="a stage is gone")
        with begun(running) as first:
            pass
        assert deadline.begun.wait(WAIT_S)
        running.engine.go.set()
        rests = [resume(running, TEXT, ids_of(first)[-1]).content for _ in range(2)]
        assert rests[0] == rests[1]
        assert data_of(rests[0])[-1]["error"]["code"] == "stage_lost"


def test_a_refusal_keeps_its_status() -> None:
    with serving(options=options_of(Deadline())) as running:
        running.engine.refuse = StageLost("beta is gone", public="a stage is gone")
        refused = httpx.post(running.url + TEXT, json=BODIES[TEXT], headers=ASKED, timeout=WAIT_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stage_lost")
        wrong = httpx.post(
            running.url + TEXT, json=BODIES[TEXT], headers={"convoy-resumable": "yes"}, timeout=WAIT_S
        )
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (400, "invalid_request_error")
        assert len(running.engine.handles) == 0


def test_an_answer_that_is_not_streamed_is_not_kept() -> None:
    with serving(options=options_of(Deadline())) as running:
        whole = httpx.post(running.url + TEXT, json={"prompt": "a"}, headers=ASKED, timeout=WAIT_S)
        assert whole.json()["choices"][0]["text"] == REPLY


@pytest.mark.parametrize("path", BODIES)
def test_the_stream_of_another_key_is_unknown_in_each_apis_words(path: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{key}"\n' for name, key in KEYS.items()))
    with serving(options=options_of(Deadline(), keys=KeyRing.open(file))) as running:
        running.engine.pause_after = 3
        with begun(running, path, **{"x-api-key": KEYS["ann"]}) as first:
            pass
        last = ids_of(first)[-1]
        name = last.rpartition("-")[0]
        other = next(one for one in BODIES if one != path)
        refused = [
            resume(running, path, last, **{"x-api-key": KEYS["bob"]}),
            resume(running, path, f"{name}-x", **{"x-api-key": KEYS["ann"]}),
            resume(running, path, f"{name}-99999999999", **{"x-api-key": KEYS["ann"]}),
            resume(running, path, "", **{"x-api-key": KEYS["ann"]}),
            resume(running, path, "0" * 32 + "-1", **{"x-api-key": KEYS["ann"]}),
        ]
        assert [answer.status_code for answer in refused] == [404] * 5
        error = refused[0].json()["error"]
        if path == "/v1/messages":
            assert error["type"] == "not_found_error"
        else:
            assert error["code"] == "stream_not_found"
        assert refused[0].json() == refused[4].json(), "nothing tells that the id is another key's"
        assert resume(running, other, last, **{"x-api-key": KEYS["ann"]}).status_code == 404
        assert resume(running, path, f"{name}-9999", **{"x-api-key": KEYS["ann"]}).status_code == 404
        running.engine.go.set()
        assert resume(running, path, last, **{"x-api-key": KEYS["ann"]}).status_code == 200


def test_a_detached_stream_counts_as_a_request_of_its_key(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(mode=0o600)
    file.write_text(f'[[keys]]\nname = "ann"\nkey = "{KEYS["ann"]}"\nconcurrent_requests = 1\n')
    deadline, own = Deadline(), {"x-api-key": KEYS["ann"]}
    with serving(options=options_of(deadline, keys=KeyRing.open(file))) as running:
        running.engine.pause_after = 3
        with begun(running, **own) as first:
            pass
        assert deadline.begun.wait(WAIT_S)
        second = httpx.post(running.url + TEXT, json=BODIES[TEXT], headers=own, timeout=WAIT_S)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        running.engine.go.set()
        assert resume(running, TEXT, ids_of(first)[-1], **own).status_code == 200
        second = httpx.post(running.url + TEXT, json=BODIES[TEXT], headers=own, timeout=WAIT_S)
        assert second.status_code == 200
        counts = httpx.get(f"{running.url}/metrics", headers=own).text
        assert 'convoy_key_tokens_total{key="ann",kind="completion"} 34' in counts


def test_a_drain_waits_for_a_detached_stream_and_lets_it_be_resumed() -> None:
    deadline = Deadline()
    with serving(options=options_of(deadline)) as running:
        running.engine.pause_after = 3
        with begun(running) as first:
            pass
        assert deadline.begun.wait(WAIT_S)
        running.stop.request()
        wait_until(lambda: httpx.get(f"{running.url}/health").status_code != 200)
        with httpx.stream(
            "POST", running.url + TEXT, headers={"last-event-id": ids_of(first)[-1]}, timeout=WAIT_S
        ) as answer:
            running.engine.go.set()
            assert answer.read().endswith(b"data: [DONE]\n\n")
        running.thread.join(WAIT_S)
        assert not running.thread.is_alive()


class Word(msgspec.Struct):
    """Make an event of a known size."""

    text: str


async def never() -> Message:
    """Receive nothing from a client that stays connected."""
    coming: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    return await coming


def exchange_of(sent: list[Message]) -> Exchange:
    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(message: Message) -> None:
        sent.append(message)

    return Exchange(receive, send, 10.0)


async def complete(streams: KeptStreams, key: bytes, words: Sequence[str]) -> tuple[KeptStream, bytes]:
    """Return a stream that has ended, and the bytes that its connection got."""
    sent: list[Message] = []
    exchange = exchange_of(sent)
    stream = streams.open(key, "completion", exchange)
    await stream.start_events()
    await stream.send_events([Word(word) for word in words])
    await stream.end_events()
    await stream.send_to(exchange)
    return stream, b"".join(message.get("body", b"") for message in sent)


def test_a_key_loses_its_oldest_stream_and_no_other_keys() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_streams=3, max_streams_each=2))
        (first, _), (second, _) = [await complete(streams, b"ann", ["a"]) for _ in range(2)]
        other, _ = await complete(streams, b"bob", ["b"])
        third, _ = await complete(streams, b"ann", ["c"])
        for stream in (second, third):
            assert streams.find(b"ann", "completion", f"{stream.name}-0")[0] is stream
        assert streams.find(b"bob", "completion", f"{other.name}-0") == (other, 1)
        with pytest.raises(UnknownStream):
            streams.find(b"ann", "completion", f"{first.name}-0")
        assert streams.num_streams == 3
        for stream in (second, third, other):
            stream.drop()
        assert (streams.num_streams, streams.num_bytes) == (0, 0)

    asyncio.run(run())


def test_the_key_with_the_most_streams_gives_way_to_a_new_key() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_streams=4, max_streams_each=3))
        running = [streams.open(b"bob", "completion", exchange_of([])) for _ in range(2)]
        (first, _), (second, _) = [await complete(streams, b"ann", ["a"]) for _ in range(2)]
        running += [streams.open(b"carl", "completion", exchange_of([]))]
        # Bob has more streams, but all of them run.
        running += [streams.open(b"carl", "completion", exchange_of([]))]
        for stream in (first, second):
            with pytest.raises(UnknownStream):
                streams.find(b"ann", "completion", f"{stream.name}-0")
        assert streams.num_streams == 4
        with pytest.raises(RateLimited, match=r"0 streams of this key and 4 in all .* limits are 3 and 4"):
            streams.open(b"dan", "completion", exchange_of([]))
        for stream in running:
            stream.drop()
        await complete(streams, b"ann", ["a"])
        largest = [(await complete(streams, b"bob", ["b"]))[0] for _ in range(3)]
        await complete(streams, b"dan", ["d"])
        with pytest.raises(UnknownStream):
            streams.find(b"bob", "completion", f"{largest[0].name}-0")
        assert streams.find(b"bob", "completion", f"{largest[1].name}-0")[0] is largest[1]

    asyncio.run(run())


def test_running_streams_are_never_pushed_out_by_number() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_streams_each=1))
        running = streams.open(b"ann", "completion", exchange_of([]))
        with pytest.raises(RateLimited):
            streams.open(b"ann", "completion", exchange_of([]))
        running.drop()

    asyncio.run(run())


def test_a_long_stream_loses_its_oldest_events_and_says_so() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_bytes_each=10_000))
        stream = streams.open(b"ann", "completion", exchange_of([]))
        await stream.start_events()
        for number in range(1000):
            await stream.send_events([Word(f"{number}")])
            assert streams.num_bytes <= 10_000
        await stream.end_events()
        with pytest.raises(UnknownStream, match="no longer kept"):
            await stream.send_to(exchange_of([]), 1)

    asyncio.run(run())


def test_the_largest_key_pays_when_all_keys_have_too_much() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_bytes=20_000, max_bytes_each=15_000))
        small, small_data = await complete(streams, b"ann", ["a" * 1000] * 3)
        large, _ = await complete(streams, b"bob", ["b" * 1000] * 12)
        await complete(streams, b"carl", ["c" * 1000] * 6)
        assert streams.num_bytes <= 20_000
        sent: list[Message] = []
        await small.send_to(exchange_of(sent))
        assert b"".join(message.get("body", b"") for message in sent) == small_data
        with pytest.raises(UnknownStream):
            streams.find(b"bob", "completion", f"{large.name}-0")

    asyncio.run(run())


def test_streams_of_one_large_event_stay_within_both_limits() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_bytes=8_000, max_bytes_each=3_000))
        for num_keys, key in enumerate((b"ann", b"bob", b"carl", b"dan"), 1):
            for _ in range(4):
                stream = streams.open(key, "completion", exchange_of([]))
                await stream.start_events()
                for _ in range(2):
                    await stream.send_events([Word("x" * 1000)])
                    assert streams.num_bytes <= min(8_000, 3_000 * num_keys)
        large = streams.open(b"eve", "completion", exchange_of([]))
        await large.start_events()
        await large.send_events([Word("x" * 10_000)])
        assert streams.num_bytes <= 8_000
        exchange = exchange_of([])
        with pytest.raises(UnknownStream, match="no longer kept"):
            await large.send_to(exchange)
        assert exchange.status == 0

    asyncio.run(run())


def test_a_largest_stream_of_one_event_does_not_shield_the_others() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions(max_bytes_each=10_000))
        one = streams.open(b"ann", "completion", exchange_of([]))
        await one.start_events()
        await one.send_events([Word("x" * 6_000)])
        other = streams.open(b"ann", "completion", exchange_of([]))
        await other.start_events()
        for _ in range(100):
            await other.send_events([Word("y" * 100)])
            assert streams.num_bytes <= 10_000
        await one.end_events()
        sent: list[Message] = []
        await one.send_to(exchange_of(sent))
        assert b"x" * 6_000 in b"".join(message.get("body", b"") for message in sent)

    asyncio.run(run())


def test_a_resumed_stream_is_sent_in_small_parts() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions())
        stream, whole = await complete(streams, b"ann", ["a" * 1000] * 3000)
        sent: list[Message] = []
        await stream.send_to(exchange_of(sent))
        bodies = [message.get("body", b"") for message in sent]
        assert b"".join(bodies) == whole
        assert max(map(len, bodies)) <= 256 * 1024
        _, large = await complete(streams, b"bob", ["b" * 300_000] * 2)
        assert large.count(b"\n\n") == 2, "an event over the limit is sent whole"

    asyncio.run(run())


def test_a_newer_connection_ends_one_that_does_not_read() -> None:
    async def run() -> None:
        stream, whole = await complete(KeptStreams(ResumeOptions()), b"ann", ["a" * 1000] * 1000)
        is_blocked = asyncio.Event()

        async def send(message: Message) -> None:
            if message["type"] == "http.response.body":
                is_blocked.set()
                await never()

        older = Exchange(never, send, 3600.0)
        waiting = asyncio.ensure_future(older.while_connected(stream.send_to(older)))
        await asyncio.wait_for(is_blocked.wait(), WAIT_S)
        sent: list[Message] = []
        await stream.send_to(exchange_of(sent))
        assert b"".join(message.get("body", b"") for message in sent) == whole
        with pytest.raises(StreamTaken):
            await asyncio.wait_for(waiting, WAIT_S)

    asyncio.run(run())


def test_an_unknown_event_leaves_the_present_connection_alone() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions())
        stream = streams.open(b"ann", "completion", exchange_of([]))
        is_sent, sent = asyncio.Event(), list[Message]()

        async def send(message: Message) -> None:
            sent.append(message)
            if b'"one"' in message.get("body", b""):
                is_sent.set()

        present = asyncio.ensure_future(stream.send_to(Exchange(never, send, 10.0)))
        await stream.start_events()
        await stream.send_events([Word("one")])
        await asyncio.wait_for(is_sent.wait(), WAIT_S)
        with pytest.raises(UnknownStream):
            await stream.send_to(exchange_of([]), 99)
        await stream.send_events([Word("two")])
        await stream.end_events()
        await asyncio.wait_for(present, WAIT_S)
        assert b'"two"' in b"".join(message.get("body", b"") for message in sent)
        stream.drop()

    asyncio.run(run())


def test_an_internal_error_without_a_client_is_logged_without_its_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def run() -> None:
        stream = KeptStreams(ResumeOptions()).open(b"ann", "completion", exchange_of([]))
        ended = asyncio.Event()

        async def work(error: Exception) -> None:
            raise error

        for error in (ValueError("a prompt"), StageLost("beta is gone", public="a stage is gone")):
            with ExitStack() as held:
                held.callback(ended.set)
                stream.begin(work(error), held.pop_all())
            await asyncio.wait_for(ended.wait(), WAIT_S)
            ended.clear()
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert f"request={stream.id} class=ValueError at={__file__}:" in caplog.text
        assert "a prompt" not in caplog.text

    asyncio.run(run())


def test_a_resumed_stream_counts_as_an_answer_once_its_work_has_ended() -> None:
    async def run() -> None:
        unused: Any = None
        streams, lifecycle, caller = KeptStreams(ResumeOptions()), Lifecycle(), anyone()
        stream = streams.open(caller.salt, "completion", exchange_of([]))
        may_end, counts = asyncio.Event(), list[int]()

        async def work() -> None:
            await stream.start_events()
            await stream.send_events([Word("one"), Word("two")])
            await may_end.wait()
            await stream.end_events()

        async def send(_: Message) -> None:
            counts.append(lifecycle.num_answers)

        with ExitStack() as held:
            held.enter_context(lifecycle.answering())
            stream.begin(work(), held.pop_all())
        # The work now waits.
        await asyncio.sleep(0)
        lifecycle.draining = True
        app = Generate(
            service=unused,
            options=unused,
            lifecycle=lifecycle,
            intake=unused,
            repeats=unused,
            streams=streams,
            waker=unused,
            kind="completion",
            decode=unused,
            translate=unused,
            answer=unused,
        )
        exchange = Exchange(never, send, 10.0)
        headers = [(b"last-event-id", f"{stream.name}-0".encode())]
        scope = {"convoy.exchange": exchange, "convoy.caller": caller, "headers": headers}
        resumed = asyncio.ensure_future(app(scope, never, send))
        # The work ends after the application has found the stream, and before its connection is attached.
        may_end.set()
        await asyncio.wait_for(resumed, WAIT_S)
        assert exchange.complete
        assert min(counts) == 1
        assert lifecycle.num_answers == 0
        stream.drop()

    asyncio.run(run())


def test_ids_cannot_be_guessed() -> None:
    async def run() -> None:
        streams = KeptStreams(ResumeOptions())
        names = {streams.open(bytes([i]), "completion", exchange_of([])).name for i in range(64)}
        assert len(names) == 64
        assert all(len(name) == 32 for name in names)

    asyncio.run(run())


@pytest.mark.outside
def test_a_stream_is_resumed_after_its_client_and_a_link_were_lost_in_between() -> None:
    body = {"prompt": "Once upon a time", "stream": True, "max_tokens": 40, "seed": 7, "ignore_eos": True}
    with serve("demo-mini", members=2) as server:
        expected = httpx.post(f"{server.url}{TEXT}", json=body, timeout=60.0).content
    # The link ends in the middle of the answer.
    with serve("demo-mini", members=2, faults={("alpha", "beta"): [Cut(at=60)]}) as server:
        with httpx.stream("POST", f"{server.url}{TEXT}", json=body, headers=ASKED, timeout=60.0) as answer:
            first = next(answer.iter_raw())
        again = {"last-event-id": ids_of(first)[-1]}
        rest = httpx.post(f"{server.url}{TEXT}", headers=again, timeout=60.0).content
        assert server.status().recoveries == 1
    assert len(text_of(expected)) > 20
    assert text_of(first + rest) == text_of(expected)
