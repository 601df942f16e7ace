"""What a provider is paid for at most, whatever it says."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import pytest
from sqlalchemy import select

from convoy.crypto.sealed.answer import AnswerSealer, most_chunk_bytes
from convoy.crypto.sealed.request import most_body_bytes, sealed_size
from convoy.errors import ProviderError
from convoy.fleet.answer import AnswerHead
from convoy.fleet.answer_text import MAX_LINE_BYTES, AnswerText
from convoy.fleet.books.price import Price
from convoy.fleet.books.tables import CHARGES
from convoy.fleet.capacity import Capacity
from convoy.fleet.consumer_request import ModelOptions, read_consumer_request
from convoy.fleet.coordinator.bounds import BilledOutcome, most_billed
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.wire.fleet.messages import Began, Chunk, Done, FleetMessage, Offer, Registered, Serve
from fleet.coordinator.providers.test_connection import HEAD, TOKEN, RawProvider, opened
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.waiting import wait_until

MICRO = Price(1_000_000, 1_000_000)  # a token costs 1
OPTIONS = CoordinatorOptions(instance="test", models={MODEL: ModelOptions(MICRO, 1024)})
FULL = 10**12
TOO_LONG = b'{"error":{"message":"long","code":"context_length_exceeded"}}'
WANTED = read_consumer_request(msgspec.json.encode(question(1, 2, max_tokens=1000)), "chat", "", {})


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path, OPTIONS)
    yield made
    made.close()


def greedy(serve: Serve, sealer: AnswerSealer, said: BilledOutcome) -> list[FleetMessage]:
    """Answer with one character, and report the token counts of ``said`` for it."""
    return [
        Began(serve.request_id, sealer.nonce),
        Chunk(serve.request_id, sealer.seal(HEAD), 0, False),
        Chunk(serve.request_id, sealer.seal(TOKEN), said.completion_tokens, False),
        Chunk(serve.request_id, sealer.seal(b"data: [DONE]\n\n"), said.completion_tokens, False),
        Chunk(serve.request_id, sealer.seal(b"", last=True), said.completion_tokens, True),
        Done(serve.request_id, said.prompt_tokens, said.completion_tokens),
    ]


Answer = Callable[[Serve, AnswerSealer, BilledOutcome], list[FleetMessage]]


def charged(
    fleet: FleetUnderTest,
    body: bytes,
    said: BilledOutcome,
    template_tokens: int = 0,
    *,
    answer: Answer = greedy,
    status: int = 200,
) -> int:
    """Return the cost of an answer, by default of one character, for the tokens that its provider reports."""
    offer = Offer(MODEL, 4, 10.0, 20.0, 100.0, 4096, template_tokens)
    before = fleet.ledger.balance("ann")

    def ask() -> httpx.Response:
        with fleet.client() as client:
            headers = {"content-type": "application/json"}
            return client.post("/v1/chat/completions", content=body, headers=headers)

    with ThreadPoolExecutor(1) as pool, RawProvider(fleet) as raw:
        fleet.directory.approve(raw.identity.public_key, "greedy")
        raw.send(raw.registration(offers=[offer]))
        assert isinstance(raw.receive(), Registered)
        asked = pool.submit(ask)
        serve = raw.next_request()
        for message in answer(serve, opened(raw, serve, "greedy"), said):
            raw.send(message)
        assert asked.result().status_code == status
    return before - fleet.ledger.balance("ann")


BODY = msgspec.json.encode(question(20, 22, stream=True))


@pytest.mark.parametrize(
    ("said", "template_tokens", "billed"),
    [
        (BilledOutcome(14, 1), 0, 14 + 1),
        (BilledOutcome(1 << 30, 0), 0, len(BODY)),
        (BilledOutcome(1 << 30, 0), 512, len(BODY) + 512),
        (BilledOutcome(0, 1024), 0, 1 + 64),
        (BilledOutcome(1 << 39, 1 << 39), 100, len(BODY) + 100 + 1 + 64),
    ],
)
def test_a_provider_bills_what_was_sent_and_seen_and_no_more(
    fleet: FleetUnderTest, said: BilledOutcome, template_tokens: int, billed: int
) -> None:
    assert charged(fleet, BODY, said, template_tokens) == billed
    beyond = said.prompt_tokens + said.completion_tokens - billed
    with fleet.admin() as admin:
        assert admin.get("/providers").json()[0]["unbilled_tokens"] == beyond


def test_of_several_choices_each_bills_max_tokens_at_most(fleet: FleetUnderTest) -> None:
    body = msgspec.json.encode(question(20, 22, stream=True, max_tokens=2, n=3))
    assert charged(fleet, body, BilledOutcome(14, 1000)) == 14 + 3 * 2


def test_what_was_not_billed_and_the_template_are_shown(fleet: FleetUnderTest, tmp_path: Path) -> None:
    charged(fleet, BODY, BilledOutcome(10_000, 1000), 7)
    with fleet.admin() as admin:
        key = admin.post("/keys", json={"scope": "metrics"}).json()["key"]
        scraped = admin.get("/metrics", headers={"authorization": f"Bearer {key}"}).text
    lines = [line for line in scraped.splitlines() if line.startswith("convoy_fleet_unbilled_tokens_total{")]
    assert all('provider="greedy"' in line for line in lines)
    counted = {"prompt" if 'kind="prompt"' in line else "completion": line.split()[-1] for line in lines}
    assert {kind: float(n) for kind, n in counted.items()} == {"prompt": 9993 - len(BODY), "completion": 935}
    with engine_server(FakeEngine()) as url:
        fleet.add("listed", url, Capacity(4, 100, 300, 5000, 4096, template_tokens=7))
        with fleet.admin() as admin:
            listed = admin.get("/status").json()["providers"][0]
    assert listed["template_tokens"] == {MODEL: 7}
    assert listed["unbilled_tokens"] == 0


@pytest.mark.parametrize("tokens", [-1, 513])
def test_no_template_is_longer_than_512_tokens(tokens: int) -> None:
    with pytest.raises(ProviderError, match="expected 0 to 512"):
        Capacity(1, 1, 1, 1, 1, template_tokens=tokens).check()


def test_an_answer_is_bounded_by_its_text_and_by_what_was_asked() -> None:
    def most(text_bytes: int) -> int:
        return most_billed(WANTED, template_tokens=0, text_bytes=text_bytes, refusal=None).completion_tokens

    assert [most(count) for count in (0, 100, 748, 10**6)] == [64, 189, 999, 1000]


def test_a_prompt_that_is_refused_as_too_long_costs_a_sixteenth_of_its_guess() -> None:
    long = read_consumer_request(msgspec.json.encode(question(1, 2, user="x" * 64_000)), "chat", "", {})
    most = most_billed(long, template_tokens=512, text_bytes=10**6, refusal=TOO_LONG)
    assert most == BilledOutcome(len(msgspec.json.encode(question(1, 2, user="x" * 64_000))) // 4 // 16, 0)


@pytest.mark.parametrize("body", [b"", b"{", TOO_LONG[:-1], b'{"error":{"code":"invalid_json"}}', b"[]"])
def test_any_other_refusal_is_bounded_by_nothing_at_all(body: bytes) -> None:
    assert most_billed(WANTED, template_tokens=512, text_bytes=10**6, refusal=body) == BilledOutcome(0, 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "billed"), [(b'{"error":{"message":"temperature: too hot"}}', 0), (TOO_LONG, 3)]
)
def test_what_a_refusal_costs_is_read_in_its_body_whatever_its_provider_says(
    fleet: FleetUnderTest, body: bytes, billed: int, stream: bool
) -> None:
    asked = msgspec.json.encode(question(20, 22, stream=stream, user="x" * 100))
    assert len(asked) // 4 // 16 == 3

    def refusal(serve: Serve, sealer: AnswerSealer, said: BilledOutcome) -> list[FleetMessage]:
        head = msgspec.json.encode(AnswerHead(400, "application/json"))
        pieces = [head, body[:20], body[20:]]
        return [
            Began(serve.request_id, sealer.nonce),
            *(Chunk(serve.request_id, sealer.seal(piece), 0, False) for piece in pieces),
            Chunk(serve.request_id, sealer.seal(b"", last=True), 0, True),
            Done(serve.request_id, said.prompt_tokens, said.completion_tokens),
        ]

    assert charged(fleet, asked, BilledOutcome(1 << 30, 1 << 30), answer=refusal, status=400) == billed


def test_a_prompt_that_the_engine_refuses_as_too_long_costs_something_and_any_other_refusal_nothing(
    fleet: FleetUnderTest,
) -> None:
    engine, long = FakeEngine(), "What is 1+2?" + " please" * 1000
    with engine_server(engine) as url, fleet.client() as client:
        fleet.add("one", url)
        for trouble, cost in (("refuses", 0), ("too long", len(long) // 4 // 16)):
            engine.trouble = [trouble]
            before = fleet.ledger.balance("ann")
            body = question(1, 2, messages=[{"role": "user", "content": long}])
            assert client.post("/v1/chat/completions", json=body).status_code == 400
            assert before - fleet.ledger.balance("ann") == pytest.approx(cost, abs=5)


def test_what_is_sealed_is_bounded_by_its_length_less_what_sealing_adds() -> None:
    for size in (0, 1, 988, 989, 100_000):
        assert size <= most_body_bytes(sealed_size(size)) <= max(1024, 1.5 * (size + 40))
    sealer = AnswerSealer(bytes(32), bytes(32))
    for size in (0, 1, 252, 253, 100_000):
        assert size <= most_chunk_bytes(len(sealer.seal(bytes(size)))) <= max(256, 1.5 * (size + 4))


def seen(*pieces: bytes) -> int:
    text = AnswerText("chat")
    for piece in pieces:
        text.feed(piece)
    return text.bytes


def test_the_text_of_a_stream_is_counted_whatever_it_is_cut_into() -> None:
    events = (
        b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"\xc3\xa9t\xc3\xa9"}}]}\r\n\r\n'
        b'data: {"choices":[{"delta":{"reasoning_content":"ab"}},{"text":"c"}]}\n\n'
        b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"long","type":"function",'
        b'"function":{"name":"f","arguments":"{}"}}]}}]}\n\n'
        b'data: {"choices":[],"usage":{"completion_tokens":900}}\n\n'
        b"data: [DONE]\n\n"
    )
    assert seen(events) == 5 + 3 + 3
    assert seen(*(events[index : index + 1] for index in range(len(events)))) == 5 + 3 + 3


def test_the_text_of_messages_is_counted_without_signatures() -> None:
    text = AnswerText("messages")
    for event in (
        b'{"type":"content_block_start","content_block":{"type":"tool_use","id":"x","name":"f","input":{}}}',
        b'{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"ab"}}',
        b'{"type":"content_block_delta","delta":{"type":"signature_delta","signature":"long"}}',
        b'{"type":"content_block_delta","delta":{"type":"input_json_delta","partial_json":"{}"}}',
        b'{"type":"message_delta","delta":{"stop_reason":"tool_use"},"usage":{"output_tokens":900}}',
    ):
        text.feed(b"event: x\ndata: " + event + b"\n\n")
    assert text.bytes == len("f") + len("{}") + 2 + 2
    whole = AnswerText("messages")
    whole.whole(b'{"type":"message","content":[{"type":"tool_use","id":"x","name":"f","input":{"a":1}}]}')
    assert whole.bytes == len("f") + len('{"a":1}')


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n\n",
        b'data: {"choices":7}\n\n',
        b'data: {"choices":[7,null]}\n\n',
        b"data: []\n\n",
        b": x\n\n",
    ],
)
def test_what_makes_no_sense_shows_no_text(data: bytes) -> None:
    assert seen(data) == 0


def test_a_line_without_end_is_not_kept_and_counts_for_nothing() -> None:
    text = AnswerText("chat")
    text.feed(b'data: {"choices":[{"text":"')
    tracemalloc.start()
    try:
        for _ in range(100):
            text.feed(b"x" * 100_000)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1.5 * MAX_LINE_BYTES
    text.feed(b'"}]}\n\ndata: {"choices":[{"text":"abc"}]}\n\n')
    assert text.bytes == 3


def test_a_tiny_piece_of_a_long_line_copies_nothing_of_what_came_before() -> None:
    text = AnswerText("chat")
    text.feed(b"data: " + bytes(MAX_LINE_BYTES * 3 // 4))
    text.feed(b"x")
    tracemalloc.start()
    try:
        for _ in range(100):
            text.feed(b"x")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < MAX_LINE_BYTES // 16


def test_a_whole_answers_text_is_counted_once(fleet: FleetUnderTest) -> None:
    with engine_server(FakeEngine()) as url, fleet.client() as client:
        fleet.add("honest", url)
        assert client.post("/v1/chat/completions", json=question(20, 22)).status_code == 200
    assert FULL - fleet.ledger.balance("ann") == len("What is 20+22?") + 2
    with fleet.admin() as admin:
        assert admin.get("/providers").json()[0]["unbilled_tokens"] == 0


def test_a_body_leaves_no_name_without_a_key_and_with_one_a_keyed_one_that_goes_after_a_day(
    tmp_path: Path,
) -> None:
    fleet = FleetUnderTest(tmp_path, replace(OPTIONS, forget_every_s=0.02))
    store = fleet.store

    def names() -> list[bytes | None]:
        with store.read() as db:
            return list(db.scalars(select(CHARGES.c.body_mac).order_by(CHARGES.c.created_s)))

    try:
        with engine_server(FakeEngine()) as url, fleet.client() as client:
            fleet.add("one", url)
            client.post("/v1/chat/completions", json=question(1, 2))
            assert names() == [None]
            client.post("/v1/chat/completions", json=question(1, 2), headers={"idempotency-key": "k"})
            assert sum(name is not None for name in names()) == 1
            with store.write() as db:
                db.execute(CHARGES.update().values(created_s=1))
            wait_until(lambda: names() == [None, None])
    finally:
        fleet.close()
