"""The client of Python over a real HTTP server with a fake engine behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import convoy
from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import ServeOptions
from convoy.cli.show.exit_codes import EXIT_CONFIG, exit_code
from convoy.errors import PeerUnreachable, QueueFull, RequestError, UsageError
from support.fake_service import REPLY, Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving() as running:
        yield running


@pytest.fixture
def client(server: Running) -> convoy.Client:
    return convoy.connect(f"{server.url}/v1")


def test_a_question_and_a_conversation_are_answered_alike(client: convoy.Client) -> None:
    one = client.chat("hello")
    assert one == client.chat([{"role": "user", "content": "hello"}])
    assert (one.text, one.finish_reason) == (REPLY, "stop")
    assert one.completion_tokens > 0
    assert one.prompt_tokens > 0


def test_an_answer_that_is_cut_off_says_so(client: convoy.Client) -> None:
    assert client.generate("hello", max_tokens=3) == convoy.Reply(REPLY[:3], "length", 5, 3)


def test_token_ids_are_a_prompt_too(client: convoy.Client) -> None:
    assert client.generate([104, 105], max_tokens=3).prompt_tokens == 2


def test_an_answer_streams_in_pieces(client: convoy.Client) -> None:
    pieces = list(client.stream("hello"))
    assert len(pieces) > 1
    assert "".join(pieces) == REPLY


def test_the_only_model_is_named_for_the_caller(client: convoy.Client) -> None:
    assert client.models() == ("fake",)
    with pytest.raises(convoy.HttpRefused, match="the model 'other' is not served here"):
        client.chat("hello", model="other")


def test_a_refusal_has_the_servers_words(server: Running) -> None:
    client = convoy.connect(server.url)
    with pytest.raises(convoy.HttpRefused, match="temperature"):
        client.chat("hello", temperature=9)


def test_a_wrong_key_is_an_error_of_configuration() -> None:
    with serving(options=ServeOptions(port=0, keys=KeyRing.of("secret-of-the-test"))) as running:
        for key in (None, "another"):
            with pytest.raises(convoy.HttpRefused) as caught:
                convoy.connect(running.url, key=key).chat("hello")
            assert exit_code(caught.value) == EXIT_CONFIG
            assert caught.value.hint is not None


def test_a_full_server_is_busy_and_worth_another_try() -> None:
    with serving() as running:
        running.engine.refuse = QueueFull("too many requests wait")
        with pytest.raises(convoy.ServerBusy, match="too many requests wait") as caught:
            convoy.connect(running.url).chat("hello")
    assert isinstance(caught.value, convoy.Unavailable)
    assert not isinstance(caught.value, RequestError)


def test_an_address_without_a_server_is_unreachable() -> None:
    with pytest.raises(PeerUnreachable, match="no server answers at") as caught:
        convoy.connect("127.0.0.1:9", timeout_s=5).models()
    assert "--" not in (caught.value.hint or "")


@pytest.mark.parametrize("url", ["ftp://there", "http://", "http://host:port"])
def test_a_wrong_address_is_refused_before_anything_is_sent(url: str) -> None:
    with pytest.raises(UsageError, match=r"^url .* is no HTTP address"):
        convoy.connect(url)
