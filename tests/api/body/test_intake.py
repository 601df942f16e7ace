"""Bodies on their way to tokens: how many there may be, for how long, and how long they may be."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import httpx
import pytest

from convoy.api.body.body_shape import MAX_PARTS, check_shape
from convoy.api.body.intake import Intake, Threads, most_body_bytes
from convoy.api.listen.options import ServeOptions
from convoy.api.service import ServedModel
from convoy.errors import QueueFull, RequestError
from support.fake_service import ByteTokenizer, FakeEngine, serving

LONG = 300 * 1024
MIB = 1 << 20


class Blocking:
    """Make a call that ends when a test lets it, and count how many run at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Semaphore(0)
        self.most = self._running = 0
        self._lock = threading.Lock()

    def __call__(self, data: bytes = b"") -> int:
        with self._lock:
            self._running += 1
            self.most = max(self.most, self._running)
        self.began.release()
        assert self.go.wait(60.0)
        with self._lock:
            self._running -= 1
        return len(data)


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    call = Blocking()
    yield call
    call.go.set()


async def began(call: Blocking) -> None:
    assert await asyncio.to_thread(call.began.acquire, timeout=60.0)


async def reserve_again(intake: Intake) -> None:
    """Reserve a place once one comes free, however long that takes."""
    async with asyncio.timeout(60.0):
        while True:
            try:
                return await intake.upload().reserve(LONG)
            except QueueFull:
                continue


async def cancel(task: asyncio.Task[object]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_clients_that_come_and_go_do_not_pile_up_threads(blocking: Blocking) -> None:
    async def scene() -> None:
        threads = Threads(2)
        for _ in range(2):
            running = asyncio.ensure_future(threads.run(blocking))
            await began(blocking)
            await cancel(running)
        for _ in range(50):
            waiting = asyncio.ensure_future(threads.run(blocking))
            await asyncio.sleep(0)
            await cancel(waiting)
        last = asyncio.ensure_future(threads.run(lambda: "done"))
        await asyncio.sleep(0)
        assert not last.done()
        blocking.go.set()
        assert await last == "done"

    asyncio.run(scene())
    assert blocking.most == 2


def test_what_a_call_raises_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise RequestError("wrong")

    async def scene() -> None:
        threads = Threads(1)
        for _ in range(3):
            with pytest.raises(RequestError, match="wrong"):
                await threads.run(fail)
        assert await threads.run(len, "abc") == 3

    asyncio.run(scene())


def test_a_stuck_call_does_not_delay_the_end_of_the_process(blocking: Blocking) -> None:
    async def scene() -> None:
        running = asyncio.ensure_future(Threads(1).run(blocking))
        await began(blocking)
        (thread,) = (one for one in threading.enumerate() if one.name == "intake")
        assert thread.daemon
        await cancel(running)

    asyncio.run(scene())


async def uploaded(intake: Intake, size: int, call: Callable[[bytes], int]) -> int:
    upload = intake.upload()
    try:
        await upload.reserve(size)
        upload.keep(bytes(size))
        return await intake.read(upload, call)
    finally:
        upload.leave()


def test_a_long_body_delays_no_short_one(blocking: Blocking) -> None:
    async def scene() -> None:
        intake = Intake(ServeOptions())
        long = [asyncio.ensure_future(uploaded(intake, LONG, blocking)) for _ in range(6)]
        await began(blocking)
        for _ in range(20):
            assert await uploaded(intake, 1000, len) == 1000
        blocking.go.set()
        assert await asyncio.gather(*long) == [LONG] * 6

    asyncio.run(scene())
    assert blocking.most == 1


def test_a_long_body_has_its_place_until_its_thread_has_ended(blocking: Blocking) -> None:
    async def scene() -> None:
        intake = Intake(ServeOptions(body_timeout_s=0.05))
        held = [intake.upload() for _ in range(7)]
        for upload in held:
            await upload.reserve(LONG)
        gone = asyncio.ensure_future(uploaded(intake, LONG, blocking))
        await began(blocking)
        await cancel(gone)
        with pytest.raises(QueueFull, match="too many long prompts"):
            await intake.upload().reserve(LONG)
        await intake.upload().reserve(1000)
        blocking.go.set()
        await reserve_again(intake)

    asyncio.run(scene())


def test_one_key_takes_half_of_the_places_and_no_more() -> None:
    async def scene() -> None:
        intake = Intake(ServeOptions(body_timeout_s=0.05))
        held = [intake.upload("one") for _ in range(4)]
        for upload in held:
            await upload.reserve(LONG)
        for _ in range(2):
            with pytest.raises(QueueFull, match="too many long prompts"):
                await intake.upload("one").reserve(LONG)
        others = [intake.upload("two") for _ in range(4)]
        for upload in others:
            await upload.reserve(LONG)
        with pytest.raises(QueueFull, match="too many long prompts"):
            await intake.upload("three").reserve(LONG)
        for upload in [*held, *others]:
            upload.leave()
        for name in ("one", "three"):
            await intake.upload(name).reserve(LONG)

    asyncio.run(scene())


def test_a_body_that_was_read_is_not_kept() -> None:
    async def scene() -> None:
        intake = Intake(ServeOptions())
        upload = intake.upload()
        await upload.reserve(LONG)
        upload.keep(bytes(LONG))
        assert await intake.read(upload, len) == LONG
        assert upload.take() == b""
        upload.leave()

    asyncio.run(scene())


class Decoded:
    """Hold values of a body."""


def test_a_body_that_is_refused_is_freed_at_once_and_not_by_the_collector() -> None:
    refs: list[weakref.ref[Decoded]] = []

    def refuse(_data: bytes) -> None:
        decoded = Decoded()
        refs.append(weakref.ref(decoded))
        raise RequestError("wrong")

    async def scene() -> None:
        threads = Threads(1)
        for _ in range(3):
            with contextlib.suppress(RequestError):
                await threads.run(refuse, b"data")
        # One call runs at a time, so the threads of the earlier ones have ended.
        assert await threads.run(len, b"data") == 4
        assert [ref() for ref in refs] == [None] * 3

    gc.disable()
    try:
        asyncio.run(scene())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("context", "longest", "chat", "expected"),
    [
        (2048, 16, True, 6 * 256 * 1024 + 65536),
        (32_768, 16, True, 8 * MIB),
        (64, 1, False, 128 * 12 * 64 + 65536),
        (64, 16, False, 128 * 6 * 64 * 16 + 65536),
        (131_072, 128, False, 8 * MIB),
        (64, None, False, 8 * MIB),
    ],
)
def test_the_limit_of_a_body_follows_from_the_context(
    context: int, longest: int | None, chat: bool, expected: int
) -> None:
    tokenizer, engine = ByteTokenizer(), FakeEngine()
    tokenizer.longest_token_bytes, engine.room = longest, context  # type: ignore[assignment]
    model = ServedModel("fake", engine, tokenizer)
    assert most_body_bytes([model], ServeOptions(), chat=chat) == expected


@pytest.mark.outside
def test_no_text_that_fits_is_refused_for_the_length_of_its_body() -> None:
    # every character escaped
    with serving(max_context=40_000) as running, httpx.Client(base_url=running.url, timeout=60.0) as http:
        body = b'{"max_tokens": 1, "prompt": "' + b"\\u0041" * 39_000 + b'"}'
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] == 39_000


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.outside
def test_a_long_body_arrives_whether_or_not_its_length_is_said(chunked: bool) -> None:
    data = b'{"max_tokens": 1, "prompt": "' + b"x" * 400_000 + b'"}'

    def parts() -> Iterator[bytes]:
        for start in range(0, len(data), 50_000):
            yield data[start : start + 50_000]

    with serving(max_context=500_000) as running, httpx.Client(base_url=running.url, timeout=60.0) as http:
        content = parts() if chunked else data
        answer = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert answer.json()["usage"]["prompt_tokens"] == 400_000


REFUSED = {
    "text": ("/v1/completions", {"prompt": "x" * 5000}, "prompt", "context_length_exceeded"),
    "token ids": ("/v1/completions", {"prompt": [1] * 5000}, "prompt", "context_length_exceeded"),
    "one of some": ("/v1/completions", {"prompt": [[1], [1] * 5000]}, "prompt", "context_length_exceeded"),
    "a chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        "messages",
        "context_length_exceeded",
    ),
    # The text and the marks of its turn fill the context, so that no token is left for the answer.
    "a chat that fills the context": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * (4096 - 17)}], "max_tokens": 1},
        "messages",
        "context_length_exceeded",
    ),
    "an input": ("/v1/responses", {"input": "x" * 5000}, "input", "context_length_exceeded"),
    "messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}] * 4097},
        "messages",
        None,
    ),
    "parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4097}]},
        "messages",
        None,
    ),
    "fields": (
        "/v1/completions",
        {"prompt": "x", "logit_bias": {str(i): 0 for i in range(100_001)}},
        None,
        "body_too_complex",
    ),
    "lists": ("/v1/completions", {"prompt": [[]] * 100_001}, None, "body_too_complex"),
}


@pytest.mark.parametrize(("path", "body", "param", "code"), REFUSED.values(), ids=REFUSED.keys())
def test_too_much_is_refused_by_name(
    path: str, body: object, param: str | None, code: str | None, http: httpx.Client
) -> None:
    answer = http.post(path, json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_biases_are_counted_before_they_are_read(http: httpx.Client) -> None:
    bias = {"no id": 0, **{str(i): 0 for i in range(1024)}}
    answer = http.post("/v1/completions", json={"prompt": "x", "logit_bias": bias})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("logit_bias has 1025 entries")


def test_brackets_and_colons_in_text_do_not_count() -> None:
    text = b'{"prompt": "' + b'[{:\\"' * 200_000 + b'"}'
    check_shape(text)
    check_shape(b"[]" * 10 + b'"' + b"[" * 200_000)  # a string without an end: no JSON, but no list either
    check_shape(b"[" * MAX_PARTS)
    for data in (b"[" * (MAX_PARTS + 1), b'"[",' * 9 + b"{}," * (MAX_PARTS + 1), b'"":0,' * (MAX_PARTS + 1)):
        with pytest.raises(RequestError, match="more than 100000 lists, objects and fields"):
            check_shape(data)
