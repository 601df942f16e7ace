from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import ProviderError
from convoy.fleet.events import MAX_EVENT_BYTES, EventReader
from convoy.wire.fleet.messages import Kind

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"text":"x"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
COMMENT = b": still here\n\n"


def test_tokens_are_counted_and_the_counts_are_kept_back_unless_asked_for() -> None:
    reader = EventReader("chat", stream=True, keep_usage=False)
    passed = reader.feed(ROLE + COMMENT + TOKEN + TEXT + USAGE + DONE)
    assert passed == ROLE + COMMENT + TOKEN + TEXT + DONE
    assert (reader.tokens, reader.prompt_tokens, reader.completion_tokens) == (2, 7, 2)
    assert reader.ended
    assert EventReader("chat", stream=True).feed(USAGE) == USAGE


def test_the_role_alone_is_no_token() -> None:
    reader = EventReader("chat", stream=True)
    reader.feed(ROLE)
    assert reader.tokens == 0


@pytest.mark.parametrize(
    "delta",
    ['{"tool_calls":[{"index":0}]}', '{"reasoning":"x"}', '{"reasoning_content":"x"}', '{"refusal":"x"}'],
)
def test_whatever_an_event_says_is_a_token(delta: str) -> None:
    reader = EventReader("chat", stream=True)
    reader.feed(f'data: {{"error":null,"choices":[{{"index":0,"delta":{delta}}}]}}\n\n'.encode())
    assert reader.tokens == 1


@given(st.lists(st.integers(1, 40), max_size=20))
def test_events_may_come_in_any_pieces(cuts: list[int]) -> None:
    whole = ROLE + TOKEN.replace(b"\n", b"\r\n") + TOKEN + DONE
    reader, passed, start = EventReader("chat", stream=True), b"", 0
    for cut in [*cuts, len(whole)]:
        passed += reader.feed(whole[start : start + cut])
        start += cut
    assert passed == ROLE + TOKEN + TOKEN + DONE
    assert (reader.tokens, reader.ended) == (2, True)


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n\n",
        b"data: [1]\n\n",
        b'data: {"error": {"message": "secret text"}}\n\n',
        b"data: " + b"x" * (MAX_EVENT_BYTES + 1),
    ],
)
def test_events_that_make_no_sense_are_refused_without_their_text(data: bytes) -> None:
    with pytest.raises(ProviderError) as caught:
        EventReader("chat", stream=True).feed(data)
    assert "secret" not in str(caught.value)


def test_counts_that_cannot_be_are_not_believed() -> None:
    reader = EventReader("chat", stream=False)
    reader.whole(b'{"usage": {"prompt_tokens": -1, "completion_tokens": "many"}}')
    assert (reader.prompt_tokens, reader.completion_tokens, reader.tokens) == (0, 0, 1)


def test_events_of_the_messages_api_are_counted_by_their_types() -> None:
    reader = EventReader("messages", stream=True, keep_usage=False)
    whole = (
        b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":9,'
        b'"cache_read_input_tokens":0,"output_tokens":0}}}\n\n'
        b'event: ping\ndata: {"type":"ping"}\n\n'
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta"}}\n\n'
        b"event: content_block_delta\n"
        b'data: {"type":"content_block_delta","delta":{"type":"signature_delta"}}\n\n'
        b'event: message_delta\ndata: {"type":"message_delta","usage":{"input_tokens":2,'
        b'"cache_read_input_tokens":7,"output_tokens":1}}\n\n'
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
    )
    assert reader.feed(whole) == whole
    assert (reader.tokens, reader.prompt_tokens, reader.completion_tokens) == (1, 9, 1)
    assert reader.ended


def test_cached_tokens_beside_a_chats_count_are_a_part_of_it() -> None:
    reader = EventReader("chat", stream=False)
    reader.whole(
        b'{"usage": {"prompt_tokens": 1000, "completion_tokens": 2, "input_tokens": 1000, "output_tokens": 2,'
        b'"cache_read_input_tokens": 900, "cache_creation_input_tokens": 50}}'
    )
    assert (reader.prompt_tokens, reader.completion_tokens) == (1000, 2)


def test_a_later_count_without_cached_tokens_does_not_lower_that_of_a_message() -> None:
    reader = EventReader("messages", stream=True)
    reader.feed(
        b'data: {"type":"message_start","message":{"usage":{"input_tokens":100,'
        b'"cache_read_input_tokens":900,"output_tokens":1}}}\n\n'
        b'data: {"type":"message_delta","usage":{"input_tokens":100,"output_tokens":5}}\n\n'
    )
    assert (reader.prompt_tokens, reader.completion_tokens) == (1000, 5)


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("completion", '{"index":0,"text":"","logprobs":{"tokens":["a"],"token_logprobs":[-1.0]}}'),
        ("chat", '{"index":0,"delta":{},"logprobs":{"content":[{"token":"a","logprob":-1.0}]}}'),
    ],
)
def test_log_probabilities_without_text_are_passed_on(kind: Kind, choice: str) -> None:
    event = f'data: {{"choices":[{choice}]}}\n\n'.encode()
    assert EventReader(kind, stream=True).feed(event * 3) == event * 3


CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"error":null}}\n\n'
WAITS = b'event: response.in_progress\ndata: {"type":"response.in_progress","response":{}}\n\n'
ADDED = b'event: x\ndata: {"type":"response.output_text.delta","delta":"x"}\n\n'
ENDED = (
    b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":9,'
    b'"input_tokens_details":{"cached_tokens":7},"output_tokens":2}}}\n\n'
)


def test_events_of_the_responses_api_are_counted_by_their_types() -> None:
    reader = EventReader("responses", stream=True, keep_usage=False)
    assert reader.feed(CREATED + WAITS + ADDED + ADDED + WAITS) == CREATED + WAITS + ADDED + ADDED + WAITS
    assert not reader.ended
    assert reader.feed(ENDED) == ENDED
    assert (reader.tokens, reader.prompt_tokens, reader.completion_tokens) == (2, 9, 2)
    assert reader.ended


def test_of_the_signs_of_life_before_a_token_one_is_passed_on() -> None:
    reader = EventReader("responses", stream=True)
    assert reader.feed(CREATED + WAITS + WAITS + WAITS + ADDED) == CREATED + WAITS + ADDED
    quiet = TOKEN.replace(b'{"content":"x"}', b"{}")
    chat = EventReader("chat", stream=True)
    assert chat.feed(ROLE + quiet + quiet + TOKEN + quiet) == ROLE + quiet + TOKEN + quiet


def failed(code: str) -> bytes:
    error = f'{{"code":"{code}","message":"too long by far"}}'
    return f'data: {{"type":"response.failed","response":{{"error":{error}}}}}\n\n'.encode()


def test_a_full_context_in_a_stream_refuses_the_request_and_no_other_error_does() -> None:
    reader = EventReader("responses", stream=True)
    assert reader.feed(CREATED + failed("context_length_exceeded")) == CREATED
    assert reader.refusal is not None
    assert (reader.refusal.message, reader.refusal.code) == ("too long by far", "context_length_exceeded")
    for events in (
        CREATED + failed("server_error"),
        CREATED + ADDED + failed("context_length_exceeded"),
        b'data: {"type":"response.failed"}\n\n',
        b'data: {"type":"error","code":"x","message":"secret"}\n\n',
    ):
        with pytest.raises(ProviderError, match="broke off"):
            EventReader("responses", stream=True).feed(events)
