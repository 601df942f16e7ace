"""A model of a hub comes to every member while another model runs: what each fetches, and how a pull ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.cluster.status import PullStatus
from convoy.config.settings import Config, override
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import RequestError
from convoy.model.checkpoints.hub.cache import list_cache
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.sdk.models import PULL_AGAIN
from convoy.sdk.pull import ModelPuller
from convoy.testing.network import MemoryNetwork
from convoy.wire.messages.fetch import Held, Holding
from support.cluster import MEMBER, PeerThread
from support.fake_hub import REPO, FakeHub
from support.members import make_local_members, membership_of
from support.odd_models import make_odd_llama
from support.waiting import wait_until

REQUEST = GenerationRequest((3, 9, 20, 7), SamplingParams(temperature=0.0), max_tokens=6)


class Pulled:
    """Run a model over alpha and beta, with a hub that has another model."""

    def __init__(self, folder: Path, hub: FakeHub, model: str = "demo-mini") -> None:
        self.caches = {name: folder / name for name in ("alpha", "beta")}
        members, network = make_local_members(("alpha", "beta")), MemoryNetwork()
        options = {
            name: replace(MEMBER, cache=cache, hub=hub.url, hub_retry_s=0.0)
            for name, cache in self.caches.items()
        }
        self.peer = PeerThread(members[1], PeerOptions(options["beta"]), network)
        self.cluster = RunningCluster.start(
            membership_of(members[0]),
            ModelSource.resolve(model),
            HeadOptions(options["alpha"], wait_s=30, num_blocks=64),
            network=network,
        )
        settings = override(Config(), model=override(Config().model, cache=self.caches["alpha"], hub=hub.url))
        self.puller = ModelPuller(self.cluster.head, settings)

    def answer(self) -> tuple[int, ...]:
        return generate(self.cluster.engine, REQUEST).token_ids

    def state(self) -> PullStatus:
        state = self.puller.report()
        assert state is not None
        return state

    def end(self) -> PullStatus:
        wait_until(lambda: self.state().state not in {"pulling", "stopping"})
        return self.state()

    def tensors(self, name: str = "beta") -> int:
        return len(list(self.caches[name].glob("models/*/tensors/*")))


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    hub = FakeHub(make_odd_llama(tmp_path / "odd"))
    yield hub
    hub.close()


@pytest.fixture
def pulled(tmp_path: Path, hub: FakeHub) -> Iterator[Pulled]:
    found = Pulled(tmp_path, hub)
    yield found
    found.cluster.close()
    found.peer.stop()


def test_each_member_gets_its_own_part_while_the_loaded_model_runs_on(pulled: Pulled, hub: FakeHub) -> None:
    before, plan_id = pulled.answer(), pulled.cluster.status().generation
    assert pulled.puller.report() is None
    pulled.puller.start(REPO)
    end = pulled.end()
    assert (end.state, end.name, end.error) == ("pulled", REPO, "")
    assert end.progress.keys() == {"alpha", "beta"}
    assert all(done == total for done, total in end.progress.values())
    all_tensors = len(ModelSource.resolve(str(hub.directory)).tensors)
    assert 0 < pulled.tensors() < all_tensors, "a part, and not the whole model"
    assert (pulled.answer(), pulled.cluster.status().generation) == (before, plan_id)
    hub.served.clear()
    pulled.puller.start(REPO)
    assert pulled.end().state == "pulled"
    assert not hub.served, "all of it is here"


def test_a_member_without_the_hub_gets_its_part_from_the_head(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.cluster.weights.hub.FromHub.get", lambda _self, _plan, parts, *_: list(parts))
    pulled = Pulled(tmp_path, hub)
    pulled.puller.start(REPO)
    assert pulled.end().state == "pulled"
    assert pulled.tensors()
    pulled.cluster.close()
    pulled.peer.stop()


def test_a_pull_that_is_stopped_stops_the_members_and_goes_on_later(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: Any = pulled.peer.peer.weights
    make_ready, begun, ended = weights.make_ready, threading.Event(), threading.Event()

    def held(asker: Any, *more: Any) -> None:
        begun.set()
        try:
            # The head's word ends it.
            wait_until(lambda: asker.check() or False)
        finally:
            ended.set()

    monkeypatch.setattr(weights, "make_ready", held)
    pulled.puller.start(REPO)
    assert begun.wait(30)
    with pytest.raises(RequestError, match=f"another model is being pulled: {REPO}"):
        pulled.puller.start(REPO)
    pulled.puller.stop()
    assert pulled.end().state == "stopped"
    assert ended.wait(30)
    assert pulled.answer()
    monkeypatch.setattr(weights, "make_ready", make_ready)
    pulled.puller.start(REPO)
    assert pulled.end().state == "pulled"


def test_a_model_that_is_loaded_meanwhile_comes_first_and_the_pull_goes_on(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights: Any = pulled.peer.peer.weights
    make_ready, begun, releases = weights.make_ready, threading.Event(), threading.Event()

    def held(asker: Any, *more: Any) -> None:
        if asker.plan.model == REPO and not releases.is_set():
            begun.set()
            wait_until(lambda: asker.check() or False)
        make_ready(asker, *more)

    monkeypatch.setattr(weights, "make_ready", held)
    pulled.puller.start(REPO)
    assert begun.wait(30)
    before = pulled.cluster
    before.unload("another model comes")
    releases.set()
    before.load(before.source, before.tokenizer)
    assert pulled.end().state == "pulled"
    assert pulled.answer()


def test_the_model_that_runs_is_served_and_kept_while_another_is_pulled(
    tmp_path: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulled = Pulled(tmp_path, hub, str(make_odd_llama(tmp_path / "other", initializer_range=0.5)))
    weights: Any = pulled.peer.peer.weights
    make_ready, later, releases = weights.make_ready, list[str](), threading.Event()

    def held(asker: Any, *more: Any) -> None:
        later.append(asker.plan.manifest)
        assert releases.wait(30)
        make_ready(asker, *more)

    monkeypatch.setattr(weights, "make_ready", held)
    active, link = pulled.cluster.head.active_plan, pulled.peer.peer.head
    assert active is not None
    assert link is not None
    pulled.puller.start(REPO)
    wait_until(lambda: bool(later))
    answer = weights.server.answers.begin(link)
    for manifest in (active.plan.manifest, *later):
        said = answer(Holding(manifest))
        assert isinstance(said, Held)
        assert said.error == ""
    releases.set()
    assert pulled.end().state == "pulled"
    in_use = {cached.name for cached in list_cache(pulled.caches["beta"]) if cached.in_use}
    assert in_use == {active.plan.manifest}
    pulled.cluster.close()
    pulled.peer.stop()


def test_the_next_pull_may_begin_as_soon_as_the_state_says_that_one_ended(
    pulled: Pulled, caplog: pytest.LogCaptureFixture
) -> None:
    class Next(logging.Handler):
        """Begin a second pull while the thread of the first one still runs."""

        ends = 0

        def emit(self, _record: logging.LogRecord) -> None:
            self.ends += 1
            if self.ends == 1:
                pulled.puller.start(REPO)

    log, following = logging.getLogger("convoy.sdk.pull"), Next()
    caplog.set_level(logging.INFO, log.name)
    log.addHandler(following)
    pulled.puller.start(REPO)
    wait_until(lambda: following.ends == 2)
    log.removeHandler(following)
    assert pulled.end().state == "pulled"


def test_a_member_that_was_lost_is_not_named_at_the_end(
    pulled: Pulled, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull: Any = pulled.cluster.head.pull
    run = pull.run

    def after_a_loss(source: ModelSource, watch: Any, tell: Any) -> set[str]:
        tell("gamma", 0, 0)
        return set(run(source, watch, tell))

    monkeypatch.setattr(pull, "run", after_a_loss)
    pulled.puller.start(REPO)
    assert pulled.end().progress.keys() == {"alpha", "beta"}


def test_what_cannot_be_pulled_is_said_and_only_the_log_has_words_that_may_hold_paths(
    pulled: Pulled, hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(RequestError, match="no model of a hub"):
        pulled.puller.start("demo")
    pulled.puller.start("nobody/none")
    end = pulled.end()
    assert end.state == "failed"
    assert "the hub has no nobody/none" in end.error
    assert end.error_type == "ModelError"
    hub.lies = "model.safetensors"
    pulled.puller.start(REPO)
    assert pulled.end().error == "the head's log has the reason"
    assert "came with the digest" in caplog.text
    assert pulled.tensors() == 0


def test_a_hub_that_does_not_answer_is_named_with_its_kind(pulled: Pulled, hub: FakeHub) -> None:
    hub.status = 503
    pulled.puller.start(f"{REPO}:Q4")
    end = pulled.end()
    assert f"{REPO}@main:Q4 cannot be fetched: the hub answers HTTP 503" in end.error
    assert (end.error_type, end.hint) == ("HubUnreachable", PULL_AGAIN)


def test_what_does_not_fit_is_refused_before_a_weight_is_downloaded(
    pulled: Pulled, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = pulled.cluster.head
    tiny = {name: msgspec.structs.replace(hello, memory_bytes=1000) for name, hello in head.hellos().items()}
    monkeypatch.setattr(head, "hellos", lambda: tiny)
    pulled.puller.start(REPO)
    assert "needs" in pulled.end().error
    headers_bytes = 100_000
    assert hub.served.get("model.safetensors", 0) < headers_bytes
