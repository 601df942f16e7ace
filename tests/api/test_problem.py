"""Every error has a place in the table, and inner text stays inside."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai as sdk
import pytest

from convoy import errors
from convoy.api import refusals
from convoy.api.problem import ANSWERS, answer_for, body_for, headers_for
from support.fake_service import Running, events, serving

SECRET = "tokens 17 23 42 of alice"
LOST = errors.StageLost(f"beta could not run step 3: {SECRET}", public="beta could not run a step")


def _tree(kind: type[errors.ConvoyError]) -> Iterator[type[errors.ConvoyError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _tree(child)


def test_every_class_of_error_has_a_status() -> None:
    # Errors of commands and of the Python API are about this API's answers and never among them.
    own = ("convoy.cli", "convoy.sdk")
    for kind in (kind for kind in _tree(errors.ConvoyError) if not kind.__module__.startswith(own)):
        assert any(base in ANSWERS for base in kind.__mro__), kind
        assert answer_for(kind.__new__(kind)).status >= 400


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.RequestError("x"), 400),
        (refusals.UnknownModel("x"), 404),
        (errors.QueueFull("x"), 429),
        (errors.NotReady("x"), 503),
        (errors.Draining("x"), 503),
        (errors.StageLost("x"), 503),
        (errors.PlanError("x"), 503),
        (errors.SealError("x"), 503),
        (errors.LinkClosed("x"), 503),
        (errors.ConfigError("x"), 500),
        (errors.SelfCheckError("x"), 500),
        (errors.ConvoyError("x"), 500),
        (ValueError("x"), 500),
    ],
)
def test_the_status_says_whose_fault_it_is(error: Exception, status: int) -> None:
    assert answer_for(error).status == status


@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        errors.SealError(SECRET),
        errors.IdentityError(SECRET),
        errors.StageLost(SECRET, hint=SECRET),
        errors.StepLate(SECRET),
        errors.NotReady(SECRET),
        errors.PlanError(SECRET, hint=SECRET),
        errors.PeerRefused(SECRET, hint=SECRET),
        LOST,
    ],
)
def test_inner_text_is_not_sent(error: Exception) -> None:
    assert SECRET not in body_for(error).error.message
    assert body_for(error).error.message


def test_of_a_loss_only_the_public_words_are_sent() -> None:
    assert body_for(LOST).error.message == "beta could not run a step"
    assert body_for(errors.StageLost(SECRET)).error.message == "a stage of the model was lost"


def test_a_hint_is_part_of_the_message() -> None:
    assert body_for(errors.RequestError("no", hint="try yes")).error.message == "no (try yes)"


def test_a_full_queue_says_when_to_come_back() -> None:
    assert headers_for(errors.QueueFull("x"))["retry-after"] == "1"
    with serving() as running:
        running.engine.refuse = errors.QueueFull("256 requests wait, and that is the limit")
        for stream in (False, True):
            body = {"prompt": "a", "stream": stream}
            answer = httpx.post(f"{running.url}/v1/completions", json=body)
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
            assert answer.json()["error"]["code"] == "queue_full"
            assert "256 requests wait" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stage_lost_before_the_first_token_is_503(stream: bool) -> None:
    with serving() as running:
        running.engine.fail_after, running.engine.error = 0, LOST
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "stream": stream})
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "beta could not run a step"


def test_a_stage_lost_in_the_middle_ends_a_whole_answer_with_503() -> None:
    with serving() as running:
        running.engine.fail_after, running.engine.error = 5, LOST
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stage_lost")


def test_a_stream_that_breaks_never_looks_complete() -> None:
    with serving() as running:
        engine = running.engine
        engine.pause_after, engine.fail_after, engine.error = 5, 5, LOST
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=body) as answer:
            assert answer.status_code == 200
            assert engine.paused.wait(10)
            engine.go.set()
            seen = events(answer.read().decode())
        assert seen[-1]["error"]["code"] == "stage_lost"
        assert "[DONE]" not in seen
        assert all(choice["finish_reason"] is None for event in seen[:-1] for choice in event["choices"])
        client = sdk.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0)
        with client, pytest.raises(sdk.APIError, match="beta could not run a step"):
            list(client.chat.completions.create(model="fake", messages=body["messages"], stream=True))  # type: ignore[call-overload]


def test_the_unforeseen_is_500_and_logged_by_class(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as running:
        running.engine.refuse = KeyError(SECRET)
        answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert answer.json()["error"] == {
            "message": "the server met an internal error",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
        assert SECRET not in caplog.text
        assert "class=KeyError" in caplog.text
        assert "fake_service.py" in caplog.text


def test_every_answer_has_a_request_id(server: Running, http: httpx.Client) -> None:
    ids = {http.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3
