"""Peers are lost in every way while two streams run, greedy and seeded: both go on with the same text.

The head runs in this process, its peers are processes of their own, over TCP and TLS.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from survival.losing import Survival, survival, told, wait_for

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def started_three() -> Iterator[Survival]:
    with survival(3, wires=("gamma",)) as s:
        yield s


@pytest.fixture
def three(started_three: Survival) -> Survival:
    """Return three members, one behind a wire."""
    return started_three.make_whole()


def test_a_member_that_stops_is_given_up_and_fenced_when_it_wakes(three: Survival) -> None:
    s = three
    told("SIGSTOP", s.check(lambda: s.stop("gamma")))
    assert s.members() == ["alpha", "beta"]
    s.go_on("gamma")
    # It reads why only if it has not written to the closed link before: that discards what came last. The
    # head may also dial again before it looks at the old link.
    fenced = "lost: (alpha is gone|the head came back on a new link)|ended: alpha closed the link"
    wait_for(lambda: re.search(fenced, s.log("gamma")))
    # It came back, and nothing ran.
    wait_for(lambda: s.members() == ["alpha", "beta", "gamma"])
    assert s.run()["greedy"].tokens
    assert s.recoveries() == 1


def test_a_link_that_is_cut_without_a_word(three: Survival) -> None:
    s = three
    wire = s.wires["gamma"]

    def cut() -> None:
        wire.block(True)
        wire.go_silent()

    told("cut link", s.check(cut))
    assert s.members() == ["alpha", "beta"]
    wire.block(False)
    wait_for(lambda: s.members() == ["alpha", "beta", "gamma"])
    assert s.run()["greedy"].tokens


def test_a_member_that_is_killed(three: Survival) -> None:
    s = three
    told("kill -9", s.check(lambda: s.kill("beta")))
    assert s.members() == ["alpha", "gamma"]
    assert s.recoveries() == 1


def test_a_loss_during_prefill(three: Survival) -> None:
    s = three
    prompt = "Here are some words to read before you answer me. " * 120
    expected = s.run(prompt=prompt)
    before = s.cluster.engine.stats().steps

    def kill_soon() -> None:
        wait_for(lambda: s.cluster.engine.stats().steps > before)
        s.kill("gamma")

    found = s.run(kill_soon, after=0, prompt=prompt, salt=b"another key")
    assert s.members() == ["alpha", "beta"]
    for name, stream in found.items():
        assert stream.tokens == expected[name].tokens


# The last with these members: one that was slow is not trusted for a while.
def test_a_slow_member_that_can_be_spared(three: Survival) -> None:
    s = three

    def slow_down() -> None:
        s.wires["gamma"].delay_s = 3.0

    told("slow member", s.check(slow_down))
    assert s.members() == ["alpha", "beta"]
