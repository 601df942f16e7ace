"""Two peers are lost, at once or in a row, or the link between two: the streams go on with the same text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from survival.losing import Survival, survival, told, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started_four() -> Iterator[Survival]:
    with survival(4, fed=True) as s:
        yield s


@pytest.fixture
def four(started_four: Survival) -> Survival:
    """Return four members."""
    return started_four.make_whole()


def test_a_member_that_hangs_while_the_loss_of_another_is_mended(four: Survival) -> None:
    s = four

    def kill_and_stop() -> None:
        s.kill("beta")
        s.stop("delta")

    told("one dies, one hangs", s.check(kill_and_stop))
    assert s.members() == ["alpha", "gamma"]


def test_two_losses_in_a_row(four: Survival) -> None:
    s = four

    def kill_two() -> None:
        s.kill("beta")
        wait_for(lambda: s.recoveries() == 1)
        s.kill("delta")

    told("two in a row", s.check(kill_two))
    assert s.members() == ["alpha", "gamma"]
    assert s.recoveries() == 2


def test_two_losses_at_once(four: Survival) -> None:
    s = four

    def kill_two() -> None:
        s.kill("gamma")
        s.kill("beta")

    told("two at once", s.check(kill_two))
    assert s.members() == ["alpha", "delta"]


def test_a_link_between_two_peers_that_loses_everything() -> None:
    with survival(3, wires=("gamma",)) as s:
        told("cut between peers", s.check(lambda: s.wires["gamma"].go_silent(2, 3)))
        assert s.recoveries() == 1


def test_the_loss_of_the_peer_that_owns_the_output() -> None:
    with survival(3, spans=["0:3", "4:7", "8:output"], fed=True) as s:
        assert s.cluster.status().stages[-1].output
        told("owner of the output", s.check(lambda: s.kill("gamma")))
        assert s.members() == ["alpha", "beta"]
