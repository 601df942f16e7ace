"""The engine as HTTP sees it: in the same process, and over the channel of a front process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace

import httpx
import msgspec
import numpy as np
import pytest

from convoy import errors
from convoy.api.front.convert import RemoteGrammar, from_error, from_request, to_error, to_request
from convoy.api.service import Handle, ServedEngine, ServedModel, Service
from convoy.cluster.metrics.families import Metric, counter, histogram, text_of
from convoy.engine.outputs import (
    EmbeddingOutput,
    ErrorOutput,
    FinishOutput,
    Output,
    PrefillOutput,
    PromptOutput,
    TokenOutput,
)
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.requests.restrictions import check_ids
from convoy.engine.stats import HistogramCounts
from convoy.errors import ConvoyError, FrameError, QueueFull, RequestError, StageLost
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.wire.front import MAX_PROMPT_PART, FrontError, RequestFields, SamplingFields
from support.fake_service import REPLY, ByteTokenizer, FakeEngine, FakeHandle, serving_of, state_of
from support.remote_engine import over_a_channel
from support.waiting import wait_until

REQUEST = GenerationRequest((1, 2), SamplingParams(temperature=0.0), max_tokens=100)
WAYS = ("in this process", "over a channel")


@contextmanager
def seen_by_http(way: str, engine: ServedEngine) -> Iterator[Service]:
    service = Service(
        (ServedModel("fake", engine, ByteTokenizer()),),
        lambda: (False, "no step passes"),
        lambda: {"model": "fake", "steps": 3},
        lambda: "hardware",
        (_families,),
    )
    if way == WAYS[0]:
        yield service
        return
    with over_a_channel(service) as (remote, _):
        yield remote


def _families() -> Iterator[Metric]:
    yield counter("convoy_things", "Things.", [({"kind": "a"}, 2.0), ({"kind": "b"}, float("inf"))])
    yield histogram("convoy_s", "Seconds.", [({}, HistogramCounts((0.1, 1.0), (1, 2, 0), 1.5))])


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    made = FakeEngine(reply="Grüße: the answer is 42.")
    yield made
    made.close()


@pytest.fixture(params=WAYS)
def service(request: pytest.FixtureRequest, engine: FakeEngine) -> Iterator[Service]:
    with seen_by_http(request.param, engine) as made:
        yield made


def outputs_of(service: Service, request: GenerationRequest) -> list[Output]:
    """Return the outputs of a request up to its end."""
    arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()
    service.models[0].engine.submit(request, arrived.put)
    outputs: list[Output] = []
    left = request.num_choices
    while left:
        outputs.append(arrived.get(timeout=60))
        left = 0 if isinstance(outputs[-1], ErrorOutput) else left - isinstance(outputs[-1], FinishOutput)
    return outputs


def test_tokens_and_texts_are_those_of_the_engine(service: Service, engine: FakeEngine) -> None:
    engine.cached_tokens = 1
    outputs = outputs_of(service, replace(REQUEST, num_choices=2))
    for choice in range(2):
        own = [one for one in outputs if isinstance(one, TokenOutput) and one.choice == choice]
        assert bytes(one.token_id for one in own).decode() == engine.reply
        assert "".join(one.text for one in own) == engine.reply
    ends = [one for one in outputs if isinstance(one, FinishOutput)]
    assert ends == [FinishOutput(choice, "stop", "", 1) for choice in range(2)]


def test_half_a_character_waits_for_its_other_half_and_comes_out_at_the_end(service: Service) -> None:
    *tokens, end = outputs_of(service, replace(REQUEST, max_tokens=3))
    assert [one.text for one in tokens if isinstance(one, TokenOutput)] == ["G", "r", ""]
    assert isinstance(end, FinishOutput)
    assert (end.reason, end.text) == ("length", "\ufffd")


def test_the_engine_looks_for_stop_strings(service: Service) -> None:
    outputs = outputs_of(service, replace(REQUEST, stop=("answer", "\ud800")))
    assert outputs[-1] == FinishOutput(0, "stop")
    assert "answer" not in "".join(one.text for one in outputs if isinstance(one, TokenOutput))


def test_the_engine_makes_no_text_that_the_front_process_makes(engine: FakeEngine) -> None:
    with seen_by_http(WAYS[1], engine) as service:
        outputs_of(service, REQUEST)
        outputs_of(service, replace(REQUEST, stop=("x",)))
    assert [handle.request.tells_text for handle in engine.handles] == [False, True]


def test_log_probabilities_of_a_long_prompt_come_as_one_output(service: Service) -> None:
    prompt = tuple(number % 256 for number in range(2 * MAX_PROMPT_PART + 7))
    request = replace(REQUEST, prompt_ids=prompt, prompt_logprobs=2, params=SamplingParams(logprobs=3))
    scored, first, *_ = outputs_of(service, request)
    assert isinstance(scored, PromptOutput)
    assert scored.logprobs[0] is None
    assert [None if one is None else one.token_id for one in scored.logprobs[1:]] == list(prompt[1:])
    assert all(one is not None and len(one.top) == 2 for one in scored.logprobs[1:])
    assert isinstance(first, TokenOutput)
    assert first.logprob is not None
    best = first.logprob.top[0]
    assert (len(first.logprob.top), best[0], first.logprob.rank) == (3, first.token_id, 1)


def test_a_prefill_is_reported(service: Service) -> None:
    assert PrefillOutput(1, 0, 2) in outputs_of(service, replace(REQUEST, tells_prefill=True))


def test_an_embedding_has_the_same_bits(service: Service) -> None:
    state, end = outputs_of(service, replace(REQUEST, embeds=True, max_tokens=0))
    assert isinstance(state, EmbeddingOutput)
    assert state.state.dtype == np.float32
    assert state.state.tobytes() == state_of(REQUEST.prompt_ids).tobytes()
    assert isinstance(end, FinishOutput)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("max_tokens is wrong", param="max_tokens", code="some_code", hint="less"),
        QueueFull("full", hint="wait", public="it is full", retry_after_s=2.5),
        StageLost("beta is gone: its words", hint="see the log", public="a stage is gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_class_and_its_fields(
    service: Service, engine: FakeEngine, error: ConvoyError
) -> None:
    engine.fail_after, engine.error = 2, error
    *_, last = outputs_of(service, REQUEST)
    assert isinstance(last, ErrorOutput)
    assert type(last.error) is type(error)
    assert vars(last.error) == vars(error)
    engine.refuse = error
    with pytest.raises(type(error)) as refused:
        service.models[0].engine.submit(REQUEST, lambda _: None)
    assert vars(refused.value) == vars(error)


class CheckingEngine(FakeEngine):
    """Check ids against the vocabulary, as the engine does."""

    def submit(self, request: GenerationRequest, on_output: Callable[[Output], None]) -> FakeHandle:
        check_ids(request, ByteTokenizer.eos_ids, ByteTokenizer.vocab_size)
        return super().submit(request, on_output)


@pytest.mark.parametrize("way", WAYS)
def test_ids_outside_the_vocabulary_are_refused_alone(way: str) -> None:
    engine = CheckingEngine()
    with seen_by_http(way, engine) as service:
        for outside in (-1, 257, 1 << 33, 1 << 62, 1 << 70):
            for embeds in (False, True):
                with pytest.raises(RequestError) as refused:
                    outputs_of(service, replace(REQUEST, prompt_ids=(1, outside), embeds=embeds))
                assert refused.value.message == "a prompt token is outside the vocabulary of 257"
                assert refused.value.param == "prompt"
            with pytest.raises(RequestError) as refused:
                outputs_of(service, replace(REQUEST, stop_token_ids=frozenset({outside})))
            assert refused.value.param == "stop_token_ids"
        assert isinstance(outputs_of(service, REQUEST)[-1], FinishOutput)
    engine.close()


def test_a_number_that_no_message_can_hold_is_refused_alone(engine: FakeEngine) -> None:
    with seen_by_http(WAYS[1], engine) as service:
        with pytest.raises(RequestError, match="no message can hold"):
            outputs_of(service, replace(REQUEST, max_tokens=1 << 70))
        assert isinstance(outputs_of(service, REQUEST)[-1], FinishOutput)


def test_a_request_ends_when_it_is_aborted(service: Service, engine: FakeEngine) -> None:
    engine.pause_after = 1
    arrived: queue.SimpleQueue[Output] = queue.SimpleQueue()
    handle: Handle = service.models[0].engine.submit(REQUEST, arrived.put)
    assert isinstance(arrived.get(timeout=60), TokenOutput)
    for _ in range(2):
        handle.abort()
    end = arrived.get(timeout=60)
    assert isinstance(end, FinishOutput)
    assert end.reason == "abort"


@pytest.mark.parametrize("text", ['{"type": "nothing"}', "{", '"\\ud800"'])
def test_a_grammar_is_refused_before_its_request_is_submitted(service: Service, text: str) -> None:
    with pytest.raises(RequestError) as refused:
        service.models[0].grammars.compile(Grammar("json_schema", text), "response_format")
    assert refused.value.param == "response_format"


def test_a_compiled_grammar_reaches_the_engine(service: Service, engine: FakeEngine) -> None:
    grammars = service.models[0].grammars
    grammars.check_schema({"type": "object"}, "response_format")
    grammar = Grammar("json_schema", '{"type": "integer"}')
    grammars.check(grammar, "response_format")
    compiled = grammars.compile(grammar, "response_format", caller=b"a", owner=b"b")
    outputs_of(service, replace(REQUEST, grammar=compiled))
    reached = engine.handles[-1].request.grammar
    assert reached is not None
    assert reached.matcher().consume(ord("4"))
    assert not reached.matcher().consume(ord("x"))


def test_the_cluster_is_described_alike(engine: FakeEngine) -> None:
    seen = []
    for way in WAYS:
        with seen_by_http(way, engine) as service:
            assert service.level is not None
            status = msgspec.json.encode(service.status())
            seen.append((service.health(), status, service.level(), text_of(service.metrics)))
    assert seen[0] == seen[1]
    assert b'convoy_things_total{kind="b"} +Inf' in seen[1][3]


def test_a_room_that_shrinks_is_told(engine: FakeEngine) -> None:
    with seen_by_http(WAYS[1], engine) as service:
        engine.room = 100
        wait_until(lambda: service.models[0].max_context == 100)


def test_requests_are_aborted_when_the_front_process_goes() -> None:
    engine = FakeEngine()
    engine.pause_after = 1
    with seen_by_http(WAYS[1], engine) as service:
        service.models[0].engine.submit(REQUEST, lambda _: None)
    assert engine.handles[0].aborted.wait(10)
    engine.close()


def test_an_internal_error_of_the_engine_tells_http_its_class_alone(engine: FakeEngine) -> None:
    engine.refuse = ValueError("the prompt of a person")
    with seen_by_http(WAYS[1], engine) as service, serving_of(service) as (url, _):
        body = {"model": "fake", "prompt": "a", "max_tokens": 3}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 500
    assert "person" not in answer.text


def test_a_stream_over_http_has_the_whole_answer(engine: FakeEngine) -> None:
    engine.reply = REPLY
    with seen_by_http(WAYS[1], engine) as service, serving_of(service) as (url, _):
        body = {"model": "fake", "prompt": "a", "max_tokens": 100}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["text"] == REPLY


def test_every_field_of_a_request_crosses_the_channel() -> None:
    assert RequestFields.__struct_fields__ == tuple(one.name for one in fields(GenerationRequest))
    assert SamplingFields.__struct_fields__ == tuple(one.name for one in fields(SamplingParams))
    params = SamplingParams(0.5, 3, 0.9, 0.1, 1.1, 0.2, -0.3, 2**64 - 1, {5: -1.5, 7: 2}, 4)
    grammar = RemoteGrammar(Grammar("regex", "a+"), "guided_regex", b"c", b"o")
    request = GenerationRequest(
        (1, 2), params, 9, ("x", "\ud800"), True, 3, 2, b"salt", True, 1, frozenset({4, 5}), (6, 7), ((8, 9),)
    )
    request = replace(request, grammar=grammar, embeds=True, tells_prefill=True, tells_text=False)
    sent = msgspec.msgpack.decode(
        msgspec.msgpack.encode(to_request(request, tells_text=False)), type=RequestFields
    )
    assert from_request(sent, grammar) == request


@pytest.mark.parametrize("kind", [errors.StepLate, errors.HandshakeLate, errors.HubUnreachable])
def test_an_error_outside_the_table_crosses_as_its_nearest_base(
    kind: Callable[[str], ConvoyError],
) -> None:
    error = kind("some words")
    crossed = from_error(to_error(error))
    assert isinstance(error, type(crossed))
    assert crossed.message == "some words"


def test_an_unknown_kind_of_error_is_no_message() -> None:
    with pytest.raises(FrameError, match="unknown kind"):
        from_error(FrontError("SystemExit", "0"))
