"""A rank of two stages of two is lost, while two streams run and while the ranks come together again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from convoy.cluster.peer.ranks import RankPeers
from convoy.engine.ranks.sums.sealed import SealedCollective
from survival.losing import Survival, survival, told

pytestmark = pytest.mark.slow
PAIRS = {"parallel": "tensor", "ranks": 2}


@pytest.fixture(scope="module")
def started_pairs() -> Iterator[Survival]:
    with survival(4, sharing=PAIRS) as s:
        yield s


@pytest.fixture
def pairs(started_pairs: Survival) -> Survival:
    """Return two stages of two ranks."""
    return started_pairs.make_whole()


# What is stopped goes on at once, and what is killed has to start again: so the kills come last.
@pytest.mark.parametrize("way", ["stop", "kill"])
@pytest.mark.parametrize("lost", ["beta", "gamma", "delta"])
def test_any_rank_of_two_stages_of_two(pairs: Survival, lost: str, way: str) -> None:
    s = pairs
    told(f"{way} of {lost}", s.check(lambda: s.lose(lost, way)))
    assert lost not in s.members()
    assert s.recoveries() == 1


def at_joining(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call ``act`` once, when the head is about to tell the other ranks their parts."""
    real, done = RankPeers.begin, threading.Event()

    def begin(self: RankPeers) -> SealedCollective:
        if not done.is_set():
            done.set()
            act()
        return real(self)

    monkeypatch.setattr(RankPeers, "begin", begin)


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_a_rank_that_goes_while_the_ranks_come_together_again(
    pairs: Survival, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gamma is lost, and while the next plan comes together beta is too: requests wait, and none fails."""
    s = pairs

    def lose() -> None:
        at_joining(monkeypatch, lambda: s.lose("beta", way))
        s.kill("gamma")

    told(f"{way} while joining", s.check(lose))
    assert set(s.members()) <= {"alpha", "delta"}
