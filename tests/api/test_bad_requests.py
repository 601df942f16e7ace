"""Bad requests: the error is one line and names the field, and other requests are not affected."""

from __future__ import annotations

from typing import Any

import httpx
import openai as sdk
import pytest
from openai import OpenAI

from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import ChatBody, decode_body
from convoy.errors import RequestError
from support.fake_service import Running, serving

ASK = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(http: httpx.Client, path: str, body: object, status: int = 400) -> dict[str, Any]:
    answer = http.post(path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return error  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("max_tokens", 0, "max_tokens is 0, expected at least 1"),
        ("max_tokens", -3, "max_tokens is -3, expected at least 1"),
        ("max_tokens", "ten", "max_tokens: expected an integer, got text"),
        ("max_tokens", 1.5, "expected an integer, got a number"),
        ("max_tokens", True, "expected an integer, got true or false"),
        ("max_completion_tokens", 0, "max_completion_tokens is 0"),
        ("temperature", 2.5, "temperature is 2.5"),
        ("temperature", -0.1, "temperature is -0.1"),
        ("temperature", "hot", "temperature: expected a number, got text"),
        ("top_p", 1.5, "top_p is 1.5"),
        ("top_k", -2, "top_k is -2"),
        ("min_p", 2, "min_p is 2"),
        ("presence_penalty", 3, "presence_penalty is 3"),
        ("seed", "x", "seed: expected an integer"),
        ("seed", 2**70, "seed is a number of 71 bits, and the limit is 64"),
        ("seed", -(2**63) - 1, "seed is -9223372036854775809, expected a whole number from"),
        ("max_tokens", 10**30, "max_tokens is a number of 100 bits, and the limit is 64"),
        ("temperature", 10**30, "temperature is a number of 100 bits"),
        ("n", 0, "n is 0, expected 1 to 16"),
        ("n", 17, "n is 17, expected 1 to 16"),
        ("stop", [""], "stop has an empty string"),
        ("stop", ["a"] * 17, "stop has 17 strings, and the limit is 16"),
        ("stop", 5, "stop: expected text or a list"),
        ("stream", "yes", "stream: expected true or false, got text"),
        ("stream_options", {"include_usage": True}, "stream_options needs stream"),
        ("logit_bias", {"x": 1}, "logit_bias has the key 'x', expected a token id"),
        ("logit_bias", {"9" * 5000: 1}, f"logit_bias has the key '{'9' * 40}', expected a token id"),
        ("logit_bias", {"01": 1}, "logit_bias has the key '01', expected a token id"),
        ("logit_bias", {"\u0661": 1}, "expected a token id"),
        ("logit_bias", {"257": 1}, "outside the vocabulary, expected ids below 257"),
        ("logit_bias", {"1": 101}, "logit_bias has a value outside -100 to 100"),
        ("top_logprobs", 2, "top_logprobs needs logprobs"),
        ("messages", [], "messages is empty"),
        ("messages", "hi", "messages: expected a list, got text"),
        ("messages", None, "messages: expected a list, got null"),
        ("tools", "hammer", "expected a list, got text"),
        ("tool_choice", "required", "but there are no tools"),
        ("tool_choice", "perhaps", "'perhaps', expected auto, none, required or a function"),
        ("reasoning_effort", "huge", "'huge', expected one of: none"),
        ("continue_final_message", True, "needs an assistant's message at the end"),
        ("guided_json", 5, "guided_json: expected"),
        ("guided_json", {"type": "strin"}, "guided_json is not a JSON schema that can be enforced"),
        ("grammar_lazy", True, "does not support grammar_lazy"),
        ("best_of", 4, "does not support best_of"),
        ("functions", [{}], "does not support functions"),
        ("reasoning_format", "none", "does not support reasoning_format"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(
    http: httpx.Client, field: str, value: object, words: str
) -> None:
    error = refused(http, CHAT, {"model": "fake", "messages": ASK, field: value})
    assert words in error["message"]
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role", "'wizard', expected one of: system"),
        ({"role": "user"}, "messages[0].content", "is missing"),
        ({"role": "user", "content": 5}, "messages[0].content", "expected text or a list, got an integer"),
        ({"content": "x"}, "messages[0].role", "it is missing"),
        ("hi", "messages[0]", "expected an object, got text"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
            "messages[0].content[0].type",
            "only 'text'",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text", "missing"),
        (
            {"role": "assistant", "content": None, "tool_calls": [{}]},
            "messages[0].tool_calls[0].id",
            "it is missing",
        ),
    ],
)
def test_a_wrong_message_is_named(http: httpx.Client, message: object, param: str, words: str) -> None:
    error = refused(http, CHAT, {"messages": [message]})
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize(
    ("prompt", "param", "words"),
    [
        ("", "prompt", "prompt is empty"),
        ([], "prompt", "prompt is empty"),
        ([[]], "prompt[0]", "prompt[0] is empty"),
        (["a", ""], "prompt[1]", "prompt[1] is empty"),
        (None, "prompt", "prompt is missing"),
        ([1, "a"], "prompt[0]", "neither text nor a list of token ids"),
        ([[1, True]], "prompt[0]", "neither"),
        ([1.5], "prompt[0]", "neither"),
        ({"a": 1}, "prompt", "expected text or a list, got an object"),
        (["a"] * 129, "prompt", "129 prompts, and the limit is 128"),
    ],
)
def test_a_wrong_prompt_is_named(http: httpx.Client, prompt: object, param: str, words: str) -> None:
    error = refused(http, TEXT, {"prompt": prompt})
    assert error["param"] == param
    assert words in error["message"]


@pytest.mark.parametrize("field", [{"logprobs": True}, {"logprobs": 21}, {"logprobs": -1}, {"suffix": "x"}])
def test_completions_have_fields_of_their_own(http: httpx.Client, field: dict[str, object]) -> None:
    assert refused(http, TEXT, {"prompt": "a", **field})["param"] == next(iter(field))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1",
        b"\xff\xfe",
        b'{"a": "\xff"}',
        b'{"\xff": 1}',
        b'{"a": 1e999}',
        b"\xef\xbb\xbf",
        b'{"a": NaN}',
        b"{'messages': []}",
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
    ],
)
def test_what_is_not_json_is_refused_as_such(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("body", "byte"),
    [
        (b'{"prompt": "\xff"}', 12),
        (b'\xef\xbb\xbf{"prompt": "ab\xff"}', 17),
        (b'{"a": 1, "\xff": 1}', 10),
        (b'{"prompt": "\xed\xa0\x80"}', 12),
    ],
)
def test_a_byte_that_is_not_utf_8_is_named_by_its_place(body: bytes, byte: int) -> None:
    with pytest.raises(RequestError, match=rf"the body is not UTF-8 \(byte {byte}\)$") as caught:
        decode_body(body, ChatBody)
    assert (caught.value.code, caught.value.param) == ("invalid_json", None)


def test_a_byte_order_mark_is_accepted(http: httpx.Client) -> None:
    body = b"\xef\xbb\xbf" + b'{"prompt": "a"}'
    answer = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("body", [b"[]", b"5", b'"hi"', b"null"])
def test_json_that_is_no_object_is_refused(http: httpx.Client, body: bytes) -> None:
    answer = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert "not an object" in answer.json()["error"]["message"]


def test_a_missing_field_is_missing_not_of_a_wrong_type() -> None:
    with pytest.raises(RequestError) as caught:
        decode_body(b"{}", ChatBody)
    assert (caught.value.param, caught.value.code) == ("messages", "missing_required_parameter")


def test_a_prompt_that_fills_the_context_is_refused(http: httpx.Client) -> None:
    error = refused(http, TEXT, {"prompt": [7] * 4096})
    assert error["code"] == "context_length_exceeded"
    assert "4096 tokens" in error["message"]


def test_an_unknown_model_is_404(http: httpx.Client) -> None:
    for path, ask in ((CHAT, {"messages": ASK}), (TEXT, {"prompt": "a"})):
        error = refused(http, path, {"model": "gpt-9", **ask}, 404)
        assert error["code"] == "model_not_found"
        assert "'gpt-9' is not served here, expected one of: fake" in error["message"]


def test_the_client_raises_its_own_classes(openai: OpenAI) -> None:
    with pytest.raises(sdk.BadRequestError, match="temperature is 3"):
        openai.completions.create(model="fake", prompt="a", temperature=3)
    with pytest.raises(sdk.NotFoundError):
        openai.completions.create(model="other", prompt="a")


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    answer = http.get("/v2/nothing")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    answer = http.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["code"] == "method_not_allowed"
    assert http.post("/health").status_code == 405
    assert http.options(CHAT).status_code == 405
    assert http.get("/v1/models/x").status_code == 404


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_says_it_is_not_json_is_refused(http: httpx.Client, kind: str) -> None:
    answer = http.post(CHAT, content=b"{}", headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert kind in answer.json()["error"]["message"]


def test_a_compressed_body_is_refused(http: httpx.Client) -> None:
    headers = {"content-encoding": "gzip", "content-type": "application/json"}
    assert http.post(CHAT, content=b"{}", headers=headers).status_code == 415


def test_a_body_over_the_limit_is_refused_before_it_is_parsed() -> None:
    with serving(options=ServeOptions(port=0, max_body_bytes=1000)) as running, httpx.Client() as client:
        url = running.url + TEXT
        body = b'{"prompt": "' + b"a" * 100_000
        answer = client.post(url, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 413
        assert "100012 bytes, and the limit is 1000 bytes" in answer.json()["error"]["message"]

        def pieces() -> Any:
            yield from (b"a" * 700 for _ in range(10))

        answer = client.post(url, content=pieces(), headers={"content-type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_long")
        assert client.post(url, json={"prompt": "a" * 900}).status_code == 200


def test_a_body_that_does_not_arrive_is_given_up(server: Running) -> None:
    import socket

    with serving(options=ServeOptions(port=0, body_timeout_s=0.2)) as running:
        host, port = running.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as client:
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{")
            assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_other_requests_go_on_beside_bad_ones() -> None:
    with serving() as running, httpx.Client(base_url=running.url) as client:
        running.engine.pause_after = 3
        with client.stream("POST", TEXT, json={"prompt": "a", "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            for body in (b"{", b'{"prompt": 1}', b'{"prompt": "a", "n": 0}'):
                assert client.post(TEXT, content=body).status_code == 400
            running.engine.go.set()
            assert list(lines)[-2] == "data: [DONE]"
