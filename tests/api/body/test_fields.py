"""Every field that other servers know is served, refused or harmless, and none of it is silent."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from api.generate_known_fields import llama_fields, openai_fields, version_of, vllm_fields
from convoy.api.body.fields import HARMLESS, HARMLESS_OF, IGNORED, OTHERS, Endpoint
from convoy.api.body.known_fields import KNOWN_FIELDS, VERSIONS
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import ChatBody, CompletionBody, decode_body
from convoy.api.openai.parsed_request import read_chat, read_completion
from convoy.api.refusals import UnknownModel
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import RequestError
from support.examples import examples
from support.fake_service import EOS, ByteTokenizer, FakeEngine, Running, serving

ASK = [{"role": "user", "content": "hi"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
KINDS: dict[Endpoint, type[ChatBody] | type[CompletionBody]] = {
    "chat": ChatBody,
    "completion": CompletionBody,
}
LEAST: dict[Endpoint, dict[str, Any]] = {"chat": {"messages": ASK}, "completion": {"prompt": "a"}}
UNUSUAL = ["something", {"of": "no kind"}]  # no field has this as the value that asks for nothing


def refusal(endpoint: Endpoint, **fields: object) -> RequestError | None:
    """Return the error of `decode_body` for these fields; None if it takes them."""
    try:
        decode_body(json.dumps({**LEAST[endpoint], **fields}).encode(), KINDS[endpoint])
    except RequestError as error:
        return error
    return None


@pytest.mark.parametrize("endpoint", KINDS)
@pytest.mark.parametrize("field", sorted({*KNOWN_FIELDS, *OTHERS}))
def test_every_known_field_is_served_or_refused_or_harmless(field: str, endpoint: Endpoint) -> None:
    served = field in KINDS[endpoint].__struct_fields__
    found = refusal(endpoint, **{field: UNUSUAL})
    refused = found is not None and found.code == "unsupported_parameter" and found.param == field
    assert [served, refused, field in IGNORED].count(True) == 1
    assert not refused or refusal(endpoint, **{field: None}) is None, "null asks for nothing"
    assert field not in IGNORED or found is None


def test_the_fields_that_were_once_ignored_are_refused() -> None:
    """Each of them changes what another server answers."""
    asked: dict[str, object] = {
        "dry_multiplier": 0.8,
        "xtc_probability": 0.5,
        "format": "json",
        "lora": [{"id": 0, "scale": 1.0}],
        "n_predict": 5,
        "verbosity": "low",
        "reasoning": {"effort": "high"},
        "enable_thinking": False,
    }
    for field, value in asked.items():
        found = refusal("chat", **{field: value})
        assert found is not None, field
        assert (found.param, found.code) == (field, "unsupported_parameter")
        assert found.hint


@pytest.mark.parametrize("endpoint", KINDS)
def test_values_that_ask_for_nothing_are_taken(endpoint: Endpoint) -> None:
    served = KINDS[endpoint].__struct_fields__
    for field, values in {**HARMLESS, **HARMLESS_OF[endpoint]}.items():
        assert field not in served
        for value in values:
            assert refusal(endpoint, **{field: value}) is None, (field, value)


def test_the_lists_name_only_fields_that_somebody_knows_and_each_once() -> None:
    one_endpoint = {name for fields in HARMLESS_OF.values() for name in fields}
    assert {*IGNORED, *HARMLESS, *one_endpoint} <= {*KNOWN_FIELDS, *OTHERS}
    assert not OTHERS & {*KNOWN_FIELDS}
    assert not {*IGNORED} & {*HARMLESS, *one_endpoint, *OTHERS}
    assert set(VERSIONS) == {engine for engines in KNOWN_FIELDS.values() for engine in engines}


def test_the_documentation_names_every_field_that_is_ignored() -> None:
    text = (Path(__file__).parents[3] / "docs/api.md").read_text("utf-8")
    assert not [field for field in IGNORED if f"`{field}`" not in text]
    assert all(version in text for version in VERSIONS.values())


def test_fields_that_nobody_knows_are_ignored() -> None:
    assert refusal("chat", unheard_of=[1], another={"a": 1}) is None


def test_a_field_of_the_other_endpoint_is_refused() -> None:
    for endpoint, field, value in (
        ("chat", "prompt", "a"),
        ("chat", "echo", True),
        ("completion", "messages", ASK),
        ("completion", "max_completion_tokens", 5),
        ("completion", "top_logprobs", 2),
    ):
        found = refusal(cast(Endpoint, endpoint), **{field: value})
        assert found is not None
        assert f"this endpoint does not support {field}" in found.message


def test_the_names_are_read_from_the_sources_of_other_servers(tmp_path: Path) -> None:
    for endpoint, name in (("chat_completion", "ChatCompletionRequest"), ("completion", "CompletionRequest")):
        path = tmp_path / "vllm/entrypoints/openai" / endpoint / "protocol.py"
        path.parent.mkdir(parents=True)
        path.write_text(f"class {name}(Base):\n    of_{endpoint}: int = 1\nclass Other:\n    no: int\n")
    assert list(vllm_fields(tmp_path)) == ["of_chat_completion", "of_completion"]
    server = tmp_path / "vendor/llama.cpp/tools/server"
    server.mkdir(parents=True)
    schema = 'add((new field_num("one", x))->add_alias("two")\n ->add_subfield((new field_bool("no", y))'
    (server / "server-schema.cpp").write_text(schema)
    (server / "server-common.cpp").write_text(
        'json_value(body, "three", 1); body.at("four"); json_value(msg, "no", 1)'
    )
    (server / "server-context.cpp").write_text('json_value(data, "five", 1); request_data.at("no");')
    assert sorted(set(llama_fields(tmp_path))) == ["five", "four", "one", "three", "two"]
    metadata = tmp_path / "vllm-1.2.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2\n")
    assert version_of(tmp_path, "vllm") == "1.2"


def test_the_list_has_all_fields_of_the_client_that_is_installed() -> None:
    import openai

    folder = Path(openai.__file__).parents[1]
    if f"openai {version_of(folder, 'openai')}" != VERSIONS["OpenAI"]:
        pytest.skip("another version than the list was made from")
    assert {field for field, engines in KNOWN_FIELDS.items() if "OpenAI" in engines} == {
        *openai_fields(folder)
    }


# Served fields.


def asked_of(server: Running, path: str, **fields: object) -> GenerationRequest:
    body = LEAST["chat" if path == CHAT else "completion"] | fields
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    return server.engine.handles[-1].request


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_rules_for_tokens_reach_the_engine(server: Running, path: str) -> None:
    rules: dict[str, object] = {
        "min_tokens": 3,
        "stop_token_ids": [70, 71, 70],
        "allowed_token_ids": [65, 66],
    }
    request = asked_of(server, path, **rules, bad_words=["no", "  yes"], max_tokens=9)
    assert request.min_tokens == 3
    assert request.stop_token_ids == {70, 71}
    assert request.allowed_token_ids == (65, 66)
    # a byte tokeniser has no word of its own behind a space
    assert request.bad_words == (tuple(b"no"), tuple(b"yes"))
    plain = asked_of(server, path, min_tokens=None, stop_token_ids=[], bad_words=[])
    assert (plain.min_tokens, plain.stop_token_ids, plain.allowed_token_ids) == (0, frozenset(), ())
    assert plain.bad_words == ()


class SpacedTokenizer(ByteTokenizer):
    """Encode a word behind a space as one token, as byte-level vocabularies do."""

    def encode_word(self, text: str) -> list[int]:
        return [200 + ord(text[1]) % 50, *text[2:].encode()] if text.startswith(" ") else list(text.encode())


def service_of(tokenizer: ByteTokenizer) -> Service:
    model = ServedModel("fake", FakeEngine(), tokenizer)
    return Service(models=(model,), health=lambda: (True, ""), status=dict)


def test_a_bad_word_counts_behind_a_space_too_where_that_is_another_token() -> None:
    body = decode_body(b'{"prompt": "a", "bad_words": [" no", "no"]}', CompletionBody)
    asked = read_completion(body, service_of(SpacedTokenizer()), ServeOptions(), b"")
    assert asked.requests[0].bad_words == ((110, 111), (200 + 110 % 50, 111))


def test_max_tokens_of_minus_one_is_no_limit(server: Running) -> None:
    for path, fields in (
        (CHAT, {"max_tokens": -1}),
        (CHAT, {"max_completion_tokens": -1}),
        (CHAT, {"max_tokens": -1, "max_completion_tokens": -1}),
        (TEXT, {"max_tokens": -1}),
    ):
        request = asked_of(server, path, **fields)
        assert request.open_ended
        assert request.max_tokens == 4096 - len(request.prompt_ids)
    assert asked_of(server, CHAT, max_tokens=-1, max_completion_tokens=7).max_tokens == 7
    assert asked_of(server, CHAT, max_tokens=7, max_completion_tokens=-1).max_tokens == 7


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": -2}, "max_tokens", "max_tokens is -2, expected at least 1, or -1 for no limit"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens", "min_tokens is 6, expected 0 to 5"),
        ({"min_tokens": -1}, "min_tokens", "min_tokens is -1, expected 0 to"),
        ({"min_tokens": 10**18}, "min_tokens", "expected 0 to"),
        ({"min_tokens": 1.5}, "min_tokens", "expected an integer"),
        ({"stop_token_ids": [257]}, "stop_token_ids", "expected ids below 257"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "expected ids below 257"),
        ({"stop_token_ids": [10**40]}, "stop_token_ids", "expected ids below 257"),
        ({"stop_token_ids": list(range(1025))}, "stop_token_ids", "1025 ids, and the limit is 1024"),
        ({"stop_token_ids": "5"}, "stop_token_ids", "expected a list, got text"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "is empty, expected at least one"),
        ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids", "1025 ids, and the limit is 1024"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids[0]", "expected an integer, got true or false"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens", "expected at least 1 that stays"),
        ({"allowed_token_ids": [65], "bad_words": ["A"]}, "bad_words", "expected at least 1 that stays"),
        ({"bad_words": ["a"] * 129}, "bad_words", "129 words, and the limit is 128"),
        ({"bad_words": ["a" * 257]}, "bad_words[0]", "257 characters, and the limit is 256"),
        ({"bad_words": ["a", " "]}, "bad_words[1]", "bad_words[1] has no token"),
        ({"bad_words": "a"}, "bad_words", "expected a list, got text"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "prompt_logprobs is 21, expected 0 to 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs is -1, expected 0 to 20"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "needs stream to be false"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_rule_that_cannot_be_kept_is_named(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    answer = http.post(path, json=LEAST["chat" if path == CHAT else "completion"] | fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert error["param"] == param


def test_prompt_logprobs_have_the_shape_of_vllm(server: Running, http: httpx.Client) -> None:
    answer = http.post(TEXT, json={"prompt": "AB", "prompt_logprobs": 2, "max_tokens": 2, "n": 2}).json()
    expected = [
        None,
        {
            "66": {"logprob": -0.066, "rank": 1, "decoded_token": "B"},
            "67": {"logprob": -1.066, "rank": 2, "decoded_token": "C"},
        },
    ]
    assert [choice["prompt_logprobs"] for choice in answer["choices"]] == [expected] * 2
    assert [choice["text"] for choice in answer["choices"]] == ["Th", "Th"]
    assert answer["choices"][0]["logprobs"] is None
    found = http.post(CHAT, json={"messages": ASK, "prompt_logprobs": 0}).json()
    prompt = server.engine.handles[-1].request.prompt_ids
    assert [entry and list(entry) for entry in found["prompt_logprobs"]] == [
        None,
        *([str(t)] for t in prompt[1:]),
    ]
    assert "prompt_logprobs" not in http.post(CHAT, json={"messages": ASK}).json()
    assert "prompt_logprobs" not in http.post(TEXT, json={"prompt": "AB"}).json()["choices"][0]


def test_each_prompt_has_its_own_log_probabilities_beside_the_echo(http: httpx.Client) -> None:
    body = {"prompt": ["AB", "C"], "echo": True, "logprobs": 1, "prompt_logprobs": 3, "max_tokens": 1}
    choices = http.post(TEXT, json=body).json()["choices"]
    assert [choice["text"] for choice in choices] == ["ABT", "CT"]
    assert [entry and len(entry) for entry in choices[0]["prompt_logprobs"]] == [None, 3]
    assert choices[1]["prompt_logprobs"] == [None]
    assert [entry and len(entry) for entry in choices[0]["logprobs"]["top_logprobs"]] == [None, 1, 1]
    unscored = {"prompt": "AB", "echo": True, "prompt_logprobs": 1, "max_tokens": 1}
    choice = http.post(TEXT, json=unscored).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("ABT", None)
    assert len(choice["prompt_logprobs"]) == 2


# Whatever comes, it is a request or a refusal.

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**25), 10**25)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "text", "fake", "", "5", "\x00", "\u2028", "9" * 30]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
names = sorted({*ChatBody.__struct_fields__, *CompletionBody.__struct_fields__, *KNOWN_FIELDS, *OTHERS})
messages_of = st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "system"]) | anything, "content": anything}
    ),
    max_size=3,
)
bodies = st.fixed_dictionaries(
    {},
    optional={
        "messages": messages_of | anything,
        "prompt": st.lists(st.integers(0, 300), max_size=4) | anything,
        "logit_bias": st.dictionaries(
            st.integers(-2, 300).map(str) | st.text(max_size=4), anything, max_size=3
        ),
        "stop": st.lists(st.text(max_size=2), max_size=3) | anything,
        "bad_words": st.lists(st.text(max_size=4), max_size=3) | anything,
    },
).flatmap(
    lambda known: st.dictionaries(st.sampled_from(names), anything, max_size=4).map(lambda more: more | known)
)
SERVICE = service_of(ByteTokenizer())


def read(data: bytes) -> None:
    """Read at both endpoints. Anything but a refusal fails the test."""
    with suppress(RequestError, UnknownModel):
        read_chat(decode_body(data, ChatBody), SERVICE, ServeOptions(), b"", dropped=DroppedHistory())
    with suppress(RequestError, UnknownModel):
        read_completion(decode_body(data, CompletionBody), SERVICE, ServeOptions(), b"")


@settings(max_examples=examples(300), deadline=None)
@given(bodies)
@example({"prompt": "a", "seed": 10**400})
@example({"prompt": "a", "logit_bias": {"9" * 5000: 1}})
@example({"prompt": "a", "max_tokens": 10**200})
@example({"prompt": "a", "temperature": 10**400})
@example({"prompt": [10**400]})
@example({"prompt": "a", "stream_options": {"include_usage": 5}})
def test_any_json_is_a_request_or_a_refusal(body: dict[str, Any]) -> None:
    read(json.dumps(body).encode())


@settings(max_examples=examples(300), deadline=None)
@given(st.binary(max_size=60))
@example(b'{"prompt": "\xff"}')
@example(b'\xef\xbb\xbf{"prompt": "a"}')
@example(b'\xef\xbb\xbf\xef\xbb\xbf{"prompt": "a"}')
@example(b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}")
@example(b'{"prompt": "a", "temperature": 1e999}')
@example(b'{"prompt": "a", "temperature": NaN}')
@example(b'{"prompt": "a", "temperature": -Infinity}')
@example(b'{"prompt": "\\ud800"}')
@example(b'{"prompt": "\\udc00\\ud800"}')
@example(b'{"\\ud800": 1}')
@example(b'{"prompt": "a", "prompt": [[1]], "n": 1, "n": "x"}')
@example(b'{"prompt": ' + b"[" * 3000 + b"]" * 3000 + b"}")
@example(b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}")
@example(b'{"unknown": ' + b'{"a":' * 2000 + b"1" + b"}" * 2000 + b"}")
@example(b'{"messages": [{"role": "user", "content": ' + b"[" * 900 + b"]" * 900 + b"}]}")
def test_any_bytes_are_a_request_or_a_refusal(data: bytes) -> None:
    read(data)


def test_a_field_that_stands_twice_counts_as_its_last() -> None:
    assert decode_body(b'{"prompt": "a", "n": 1, "n": 2}', CompletionBody).n == 2


@pytest.mark.outside
def test_a_served_model_answers_after_every_refusal() -> None:
    with serving() as running:
        for body in (b'{"prompt": "\xff"}', b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}'):
            answer = httpx.post(
                f"{running.url}{TEXT}", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == 400
        assert httpx.post(f"{running.url}{TEXT}", json={"prompt": "a"}).status_code == 200
