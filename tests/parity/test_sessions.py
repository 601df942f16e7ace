"""Sessions: whatever way they took to where they are, their logits are those of the whole model run once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.sessions.session import Session
from convoy.errors import SessionError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.output_rows import Logits
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from support.cases import cases
from support.cluster import NAMES, PeerThread
from support.members import make_local_members, membership_of

MEMBER = MemberOptions(num_threads=1, kernel="exact-f32", memory_bytes=1 << 32)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11)
LAST = 11  # of the demo model's twelve layers
LAYOUTS: dict[str, dict[str, str] | None] = {
    "alone": None,
    "default": {"alpha": "0:3,output", "beta": f"4:{LAST}"},
    "reverse": {"alpha": "5:output", "beta": "0:4"},
    "forward": {"alpha": "0:5", "beta": "6:output"},
    "three": {"alpha": "0:2,output", "beta": "3:7", "gamma": f"8:{LAST}"},
}


@contextmanager
def running(source: ModelSource, layout: str | dict[str, str], **changes: Any) -> Iterator[RunningCluster]:
    spans = LAYOUTS[layout] if isinstance(layout, str) else layout
    network = MemoryNetwork()
    members = make_local_members(NAMES[: 1 if spans is None else len(spans)])
    peers = [PeerThread(me, PeerOptions(MEMBER, model_path=source.path), network) for me in members[1:]]
    options = replace(HeadOptions(MEMBER, spans=spans, wait_s=20, num_blocks=128), **changes)
    try:
        cluster = RunningCluster.start(membership_of(members[0]), source, options, network=network)
        try:
            yield cluster
            stats = cluster.engine.stats()
            assert stats.free_blocks == stats.num_blocks, "a closed session left blocks behind"
        finally:
            cluster.close()
    finally:
        for peer in peers:
            peer.stop()


def some_tokens(source: ModelSource, count: int, seed: int = 3) -> list[int]:
    random = np.random.default_rng(seed)
    return [int(token) for token in random.integers(0, source.spec.vocab_size, count)]


class Oracle:
    """Run the whole model in one process, with each sequence in one piece. Equal sequences run once."""

    def __init__(self, cluster: RunningCluster) -> None:
        self._cluster = cluster
        self._known: dict[tuple[int, ...], Logits] = {}

    def logits(self, tokens: Sequence[int]) -> Logits:
        asked = tuple(tokens)
        if asked not in self._known:
            with self._cluster.session() as session:
                session.sync(asked)
                self._known[asked] = session.logits()
        return self._known[asked]


@pytest.fixture(scope="module")
def oracle(demo: ModelSource) -> Iterator[Oracle]:
    with running(demo, "alone", prefill_chunk=512, max_step_tokens=512) as cluster:
        yield Oracle(cluster)


def assert_at(session: Session, oracle: Oracle) -> None:
    assert np.array_equal(session.logits(), oracle.logits(session.tokens))


@pytest.mark.parametrize("layout", cases(LAYOUTS, "reverse".__eq__))
def test_a_session_that_goes_on_back_and_apart_equals_the_whole(
    demo: ModelSource, oracle: Oracle, layout: str
) -> None:
    tokens = some_tokens(demo, 90)
    with running(demo, layout, prefill_chunk=7) as cluster, cluster.session(SEEDED) as session:
        assert session.sync(tokens[:70]) == 70
        assert_at(session, oracle)
        for _ in range(5):
            session.eval(session.sample().token_id)
            assert_at(session, oracle)
        session.rewind(37)
        assert_at(session, oracle)
        with session.fork(choice=1) as fork:
            assert fork.sync([*tokens[:37], *tokens[80:90]]) <= 10 + 37 % 16
            assert_at(fork, oracle)
            assert session.sync(tokens[:60]) == 60 - 37
            assert_at(session, oracle)
            assert_at(fork, oracle)
        assert session.sync(tokens[:60]) == 0
        assert session.sync(tokens[:50]) <= 16
        assert_at(session, oracle)


def test_a_session_samples_the_tokens_of_a_request_with_its_seed(demo: ModelSource) -> None:
    prompt = some_tokens(demo, 20)
    params = replace(SEEDED, repetition_penalty=1.3, presence_penalty=0.5)
    with running(demo, "default") as cluster, cluster.session(params) as session:
        request = GenerationRequest(tuple(prompt), params, max_tokens=12, ignore_eos=True)
        expected = generate(cluster.engine, request).token_ids
        session.sync(prompt)
        while session.position < len(prompt) + 12:
            session.eval(session.sample().token_id)
        assert session.tokens[len(prompt) :] == expected


SAVED: list[tuple[str, str, dict[str, int]]] = [
    ("alone", "default", {}),
    ("default", "alone", {"block_size": 8}),
    ("reverse", "three", {"block_size": 32, "prefill_chunk": 5}),
    ("three", "forward", {}),
    ("forward", "reverse", {"prefill_chunk": 3}),
]


@pytest.mark.parametrize(("saved", "loaded", "changes"), cases(SAVED, lambda one: one[0] == "reverse"))
def test_a_saved_session_goes_on_under_another_split_as_if_it_had_never_stopped(
    demo: ModelSource, oracle: Oracle, tmp_path: Path, saved: str, loaded: str, changes: dict[str, int]
) -> None:
    tokens, path, key = some_tokens(demo, 75), tmp_path / "chat", bytes(32)
    with running(demo, saved, prefill_chunk=20) as cluster, cluster.session(SEEDED) as session:
        session.sync(tokens)
        session.eval(session.sample().token_id)
        session.save(path, key if loaded == "three" else None)
        expected = session.tokens
        sampled = session.sample()
    with running(demo, loaded, **changes) as cluster, cluster.session() as session:
        size = changes.get("block_size", 16)
        assert session.load(path, key if loaded == "three" else None) == 64 // size * size
        assert session.tokens == expected
        assert session.sample() == sampled
        assert session.num_run == 76 - 64 // size * size, "only what is behind the file's blocks is run"
        assert_at(session, oracle)
        session.eval(sampled.token_id)
        assert_at(session, oracle)


def test_sessions_among_requests_and_too_few_blocks_are_exact_and_leave_nothing(
    demo: ModelSource, oracle: Oracle, tmp_path: Path
) -> None:
    """Idle ones give way, and know what they were."""
    tokens = [some_tokens(demo, 50, seed) for seed in range(4)]
    with running(demo, "default", num_blocks=14, max_batch=2) as cluster:
        request = GenerationRequest(tuple(some_tokens(demo, 60, 9)), SEEDED, max_tokens=30, ignore_eos=True)
        expected = generate(cluster.engine, request).token_ids
        answers: list[tuple[int, ...]] = []
        errors: list[BaseException] = []

        def ask() -> None:
            answers.extend(generate(cluster.engine, request).token_ids for _ in range(3))

        def talk(index: int) -> None:
            try:
                with cluster.session() as session:
                    session.sync(tokens[index][:40])
                    for token in tokens[index][40:]:
                        session.eval(token)
                    assert_at(session, oracle)
                    session.save(tmp_path / str(index), None)
                    session.load(tmp_path / str(index))
                    assert_at(session, oracle)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        threads = [
            threading.Thread(target=ask),
            *(threading.Thread(target=talk, args=(i,)) for i in range(4)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        assert answers == [expected] * 3
        assert cluster.engine.stats().preempted > 0


def test_a_session_of_another_model_is_refused_before_anything_is_read(
    demo: ModelSource, tmp_path: Path
) -> None:
    with running(demo, "alone") as cluster, cluster.session() as session:
        session.sync([1, 2, 3])
        session.save(tmp_path / "chat", None)
    mini = ModelSource.resolve("demo-mini")
    with running(mini, "alone") as cluster, cluster.session() as session:
        with pytest.raises(SessionError, match="is of another model"):
            session.load(tmp_path / "chat")
        assert session.position == 0
