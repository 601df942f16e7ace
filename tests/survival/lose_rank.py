"""A rank of a stage is lost in every way, while two streams run and before: both go on with the same text.

The head runs in this process, its peers are processes of their own, over TCP and TLS.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from survival.losing import Survival, survival, told, wait_for

pytestmark = pytest.mark.slow
TENSOR = {"parallel": "tensor"}


def mode(s: Survival) -> str:
    return s.cluster.status().parallel.mode


@pytest.fixture(scope="module")
def started_pair() -> Iterator[Survival]:
    with survival(2, sharing=TENSOR, wires=("beta",)) as s:
        yield s


@pytest.fixture
def pair(started_pair: Survival) -> Survival:
    """Return one stage of two ranks."""
    return started_pair.make_whole()


# What is stopped goes on at once, and what is killed has to start again: so the kills come last.
def test_a_rank_whose_link_is_cut_without_a_word_makes_sums_again_once_it_is_back(pair: Survival) -> None:
    s = pair
    wire = s.wires["beta"]

    def cut() -> None:
        wire.block(True)
        wire.go_silent()

    told("cut link of a rank", s.check(cut))
    assert mode(s) == "single"
    wire.block(False)
    wait_for(lambda: mode(s) == "tensor")
    assert s.run()["greedy"].tokens


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_one_of_two_ranks(pair: Survival, way: str) -> None:
    s = pair
    assert mode(s) == "tensor"
    told(f"{way} of a rank", s.check(lambda: s.lose("beta", way)))
    assert mode(s) == "single"
    assert s.recoveries() == 1
