"""Models that are loaded and unloaded by the page: who may, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from convoy.api.keys.keys import KeyRing
from convoy.api.listen.options import PageOptions, ServeOptions
from convoy.api.model_switch import ModelSwitch, SwitchOptions
from convoy.api.page.tokens import OpenTokens, Scope
from convoy.api.service import ServedModel, Service
from convoy.errors import PeerLeft, RequestError
from support.fake_loader import FakeLoader
from support.fake_service import ByteTokenizer, FakeEngine, serving_of

KEY = "sk-test-0123456789"


class FakePuller:
    """Note what is pulled; None is a stop."""

    def __init__(self) -> None:
        self.done: list[str | None] = []

    def start(self, name: str) -> None:
        if "/" not in name:
            raise RequestError(f"{name} is no model of a hub")
        self.done.append(name)

    def stop(self) -> None:
        self.done.append(None)


class Head:
    """Hold a served head with the models a and b, and the tokens of its sessions."""

    def __init__(self, url: str, tokens: OpenTokens, loader: FakeLoader, puller: FakePuller) -> None:
        self.url, self.loader, self.puller = url, loader, puller
        self._tokens = tokens

    @contextmanager
    def session(self, scope: Scope) -> Iterator[httpx.Client]:
        token = self._tokens.make(int(self.url.rpartition(":")[2]), scope)
        with httpx.Client(base_url=self.url, timeout=60) as client:
            assert client.post("/page/session", json={"token": token}).status_code == 200
            yield client


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    tokens, loader, engine = OpenTokens(tmp_path / "open"), FakeLoader(), FakeEngine()
    models = tuple(ServedModel(name, engine, ByteTokenizer()) for name in ("a", "b"))
    puller = FakePuller()
    service = Service(
        *(models, lambda: (True, ""), dict),
        switch=ModelSwitch(loader, SwitchOptions(knows_several=True)),
        puller=puller,
    )
    options = ServeOptions(port=0, keys=KeyRing.of(KEY), page=PageOptions(tokens=tokens.folder))
    with serving_of(service, options, on_stop=engine.close) as (url, _):
        yield Head(url, tokens, loader, puller)


def test_an_operator_loads_and_unloads_a_model(head: Head) -> None:
    with head.session("operate") as operator:
        assert operator.post("/page/models", json={"name": "b", "loaded": True}).status_code == 200
        assert head.loader.done == ["b"]
        assert operator.post("/page/models", json={"name": "b", "loaded": False}).status_code == 200
        # It is unloaded already.
        assert operator.post("/page/models", json={"name": "b", "loaded": False}).status_code == 200
    assert head.loader.done == ["b", None]


def test_neither_a_viewer_nor_a_key_loads_or_unloads_a_model(head: Head) -> None:
    wish = {"name": "b", "loaded": True}
    with head.session("view") as viewer:
        assert viewer.post("/page/models", json=wish).status_code == 403
    key = {"authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{head.url}/page/models", json=wish, headers=key).status_code == 403
    assert httpx.post(f"{head.url}/page/models", json=wish).status_code == 401
    assert head.loader.done == []


def test_a_key_loads_a_model_by_naming_it_in_a_request(head: Head) -> None:
    body = {"model": "b", "prompt": "x", "max_tokens": 2}
    answer = httpx.post(f"{head.url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"})
    assert answer.status_code == 200
    assert head.loader.done == ["b"]


def test_a_key_unloads_no_model(head: Head) -> None:
    body = {"model": "a", "prompt": "x", "max_tokens": 2, "keep_alive": 0}
    for _ in range(2):
        answer = httpx.post(
            f"{head.url}/v1/completions", json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60
        )
        assert answer.status_code == 200
    # It would wait for a change that had begun.
    with head.session("operate") as operator:
        assert operator.post("/page/models", json={"name": "a", "loaded": True}).status_code == 200
    assert head.loader.done == []


def test_what_fails_is_said_to_the_operator(head: Head) -> None:
    head.loader.too_large.add("b")
    with head.session("operate") as operator:
        refused = operator.post("/page/models", json={"name": "b", "loaded": True})
        assert (refused.status_code, refused.json()["error"]["message"]) == (503, "b does not fit")
        assert head.loader.loaded == "a"
        head.loader.too_large.clear()
        head.loader.failure = PeerLeft("beta left")
        assert operator.post("/page/models", json={"name": "b", "loaded": True}).status_code == 503
        unknown = operator.post("/page/models", json={"name": "c", "loaded": True})
        assert (unknown.status_code, "a, b" in unknown.text) == (404, True)
        assert operator.post("/page/models", json={"name": "b"}).status_code == 400


def test_an_operator_pulls_a_model_and_stops_that(head: Head) -> None:
    with head.session("operate") as operator:
        assert operator.post("/page/pull", json={"name": "org/name"}).status_code == 200
        assert operator.delete("/page/pull").status_code == 200
        refused = operator.post("/page/pull", json={"name": "name"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "name is no model of a hub")
    assert head.puller.done == ["org/name", None]


def test_neither_a_viewer_nor_a_key_pulls_a_model_or_stops_that(head: Head) -> None:
    with head.session("view") as viewer:
        assert viewer.post("/page/pull", json={"name": "org/name"}).status_code == 403
        assert viewer.delete("/page/pull").status_code == 403
    key = {"authorization": f"Bearer {KEY}"}
    assert httpx.post(f"{head.url}/page/pull", json={"name": "org/name"}, headers=key).status_code == 403
    assert httpx.delete(f"{head.url}/page/pull", headers=key).status_code == 403
    assert head.puller.done == []
