"""A session whose stages are lost under it, on real processes: it knows its tokens, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from convoy.engine.session import Session
from survival.losing import PARAMS, survival

pytestmark = pytest.mark.slow
PROMPT = list(range(20, 90))


def go_on(session: Session, count: int) -> list[int]:
    for _ in range(count):
        session.eval(session.sample().token_id)
    return list(session.tokens[-count:])


def test_a_session_outlives_a_member_between_two_calls_and_while_it_is_saved(tmp_path: Path) -> None:
    with survival(3) as s:
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

            session.save(tmp_path / "chat", progress=kill_once)
            assert killed
            found += go_on(session, 5)
            assert s.members() == ["alpha"]
        with s.cluster.session() as later:
            assert later.load(tmp_path / "chat") == 80
            found += go_on(later, 10)[5:]
        assert found == expected
        stats = s.cluster.engine.stats()
        assert stats.recoveries == 2
        assert stats.free_blocks == stats.num_blocks
