"""A rank of a stage is lost in every way, while two streams run and before: both go on with the same text.

The head runs in this process, its peers are processes of their own, over TCP and TLS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from convoy.cluster.peer.ranks import RankPeers
from convoy.engine.ranks.sums.sealed import SealedCollective
from survival.losing import Survival, survival, wait_for

pytestmark = pytest.mark.slow
TENSOR = {"parallel": "tensor"}
PAIRS = {"parallel": "tensor", "ranks": 2}


def mode(s: Survival) -> str:
    return s.cluster.status().parallel.mode


def told(what: str, pause_s: float) -> None:
    print(f"{what}: {pause_s:.2f} s to the next token")


@pytest.mark.parametrize("lost", ["kill", "stop"])
def test_one_of_two_ranks(lost: str) -> None:
    with survival(2, sharing=TENSOR) as s:
        assert mode(s) == "tensor"
        pause_s = s.check(lambda: s.kill("beta") if lost == "kill" else s.stop("beta"))
        told(f"{lost} of a rank", pause_s)
        assert mode(s) == "single"
        assert s.cluster.engine.stats().recoveries == 1


def test_a_rank_whose_link_is_cut_without_a_word_makes_sums_again_once_it_is_back() -> None:
    with survival(2, sharing=TENSOR, wires=("beta",)) as s:
        wire = s.wires["beta"]

        def cut() -> None:
            wire.block(True)
            wire.go_silent()

        told("cut link of a rank", s.check(cut))
        assert mode(s) == "single"
        wire.block(False)
        wait_for(lambda: mode(s) == "tensor")
        assert s.run()["greedy"].tokens


@pytest.mark.parametrize("lost", ["beta", "gamma", "delta"])
@pytest.mark.parametrize("way", ["kill", "stop"])
def test_any_rank_of_two_stages_of_two(way: str, lost: str) -> None:
    with survival(4, sharing=PAIRS) as s:
        told(f"{way} of {lost}", s.check(lambda: s.kill(lost) if way == "kill" else s.stop(lost)))
        assert lost not in s.members()
        assert s.cluster.engine.stats().recoveries == 1


def at_joining(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Call ``act`` once, when the head is about to tell the other ranks their parts."""
    real, done = RankPeers.begin, threading.Event()

    def begin(self: RankPeers) -> SealedCollective:
        if not done.is_set():
            done.set()
            act()
        return real(self)

    monkeypatch.setattr(RankPeers, "begin", begin)


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_a_rank_that_goes_while_the_ranks_come_together_again(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gamma is lost, and while the next plan comes together beta is too: requests wait, and none fails."""
    with survival(4, sharing=PAIRS) as s:
        expected = s.run()

        def lose_another() -> None:
            (s.kill if way == "kill" else s.stop)("beta")

        def lose() -> None:
            at_joining(monkeypatch, lose_another)
            s.kill("gamma")

        began_s = time.monotonic()
        found = s.run(lose)
        told(f"{way} while joining, in all", time.monotonic() - began_s)
        assert {name: one.tokens for name, one in found.items()} == {
            name: one.tokens for name, one in expected.items()
        }
        assert set(s.members()) <= {"alpha", "delta"}
