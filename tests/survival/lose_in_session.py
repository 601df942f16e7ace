"""A session that loses its stages, on real processes: it knows its tokens, and goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from convoy.engine.sessions.session import Session
from convoy.errors import StageLost
from support.odd_models import make_odd_llama
from support.tiny_models import build_model
from survival.losing import PARAMS, WAIT_S, Stream, Survival, survival

pytestmark = pytest.mark.slow
PROMPT = list(range(20, 90))


def go_on(session: Session, count: int) -> list[int]:
    for _ in range(count):
        session.eval(session.sample().token_id)
    return list(session.tokens[-count:])


@pytest.fixture(scope="module")
def started_three() -> Iterator[Survival]:
    with survival(3) as s:
        yield s


@pytest.fixture
def session_three(started_three: Survival) -> Survival:
    """Return three members."""
    return started_three.make_whole()


def test_a_member_that_stops_while_a_session_is_saved_holds_up_neither_streams_nor_the_session(
    tmp_path: Path, session_three: Survival
) -> None:
    s = session_three
    expected = s.run()["greedy"].tokens
    with s.cluster.session(PARAMS["seeded"]) as undisturbed:
        undisturbed.sync(PROMPT)
        whole = go_on(undisturbed, 20)
    with s.cluster.session(PARAMS["seeded"]) as session:
        session.sync(PROMPT)
        found = go_on(session, 10)
        streams: list[Stream] = []
        stopped_s: list[float] = []

        def stop_once(_done: int, _total: int) -> None:
            if not stopped_s:
                streams.append(s.start(PARAMS["greedy"], "Tell me a story about a dog.", b"another"))
                stopped_s.append(time.monotonic())
                s.stop("gamma")

        failed = ""
        try:
            session.save(tmp_path / "chat", None, progress=stop_once)
        except StageLost as error:
            failed = error.message
        assert not failed or "gamma" in failed
        print(f"saved: {not failed}, {time.monotonic() - stopped_s[0]:.2f} s after SIGSTOP")
        assert streams[0].ended.wait(WAIT_S)
        assert streams[0].error is None
        assert streams[0].tokens == expected
        pause_s = streams[0].pause_s(stopped_s[0])
        print(f"SIGSTOP during a save: {pause_s:.2f} s to the next token")
        assert s.members() == ["alpha", "beta"]
        found += go_on(session, 10)
    assert found == whole
    assert (tmp_path / "chat").exists() == (not failed)
    assert s.recoveries() == 1


def test_a_session_outlives_a_member_between_two_calls_and_while_it_is_saved(
    tmp_path: Path, session_three: Survival
) -> None:
    s = session_three
    with s.cluster.session(PARAMS["seeded"]) as undisturbed:
        undisturbed.sync(PROMPT)
        expected = go_on(undisturbed, 30)
    with s.cluster.session(PARAMS["seeded"]) as session:
        session.sync(PROMPT)
        found = go_on(session, 10)
        s.kill("beta")
        found += go_on(session, 10)
        assert s.members() == ["alpha", "gamma"]
        killed: list[str] = []

        def kill_once(_done: int, _total: int) -> None:
            if not killed:
                killed.append("gamma")
                s.kill("gamma")

        session.save(tmp_path / "chat", None, progress=kill_once)
        assert killed
        found += go_on(session, 5)
        assert s.members() == ["alpha"]
    with s.cluster.session() as later:
        assert later.load(tmp_path / "chat") == 80
        found += go_on(later, 10)[5:]
    assert found == expected
    stats = s.cluster.engine.stats()
    assert s.recoveries() == 2
    assert stats.free_blocks == stats.num_blocks


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_5"])
def test_turns_behind_a_cached_prefix_outlive_the_member_that_kept_it(kind: str, tmp_path: Path) -> None:
    make_odd_llama(tmp_path)  # for its tokenizer
    build_model(kind).save_pretrained(tmp_path)
    prompt = [token % 90 + 5 for token in range(130)]
    turn = [*prompt[:120], *range(30, 60)]
    with survival(2, model=str(tmp_path)) as s:
        with s.cluster.session(PARAMS["seeded"]) as cold:
            assert cold.sync(turn) == len(turn)
            expected = go_on(cold, 30)
        with s.cluster.session(PARAMS["seeded"], salt=b"a key") as first:
            first.sync(prompt)
        with s.cluster.session(PARAMS["seeded"], salt=b"a key") as session:
            assert session.sync(turn) == len(turn) - 112
            found = go_on(session, 10)
            s.kill("beta")
            found += go_on(session, 20)
            assert found == expected
            assert s.members() == ["alpha"]
        with s.cluster.session(PARAMS["seeded"], salt=b"a key") as again:
            assert again.sync(turn) <= len(turn) - 112, "the new stages have what was replayed"
            assert go_on(again, 30) == expected
        stats = s.cluster.engine.stats()
        assert stats.recoveries == 1
        assert stats.free_blocks == stats.num_blocks
