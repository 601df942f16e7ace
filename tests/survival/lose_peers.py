"""Peers are lost in every way while two streams run, greedy and seeded: both go on with the same text.

The head runs in this process, its peers are processes of their own, over TCP and TLS.
"""

from __future__ import annotations

import re
import threading

import pytest

from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.registry import own_form
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.span import Span
from survival.losing import PARAMS, survival, wait_for

pytestmark = pytest.mark.slow


def told(what: str, pause_s: float) -> None:
    print(f"{what}: {pause_s:.2f} s to the next token")


def bytes_for(first_layers: int) -> int:
    """Return the bytes for so many layers, the ends and some K/V, but not for one layer more."""
    spec = ModelSource.resolve("demo").spec
    return stage_bytes(spec, Span(0, first_layers, True), own_form("exact-f32")) + 1_000_000


def test_a_member_that_is_killed() -> None:
    with survival(3) as s:
        pause_s = s.check(lambda: s.kill("beta"))
        told("kill -9", pause_s)
        assert s.members() == ["alpha", "gamma"]
        assert s.cluster.engine.stats().recoveries == 1


def test_a_member_that_stops_is_given_up_and_fenced_when_it_wakes() -> None:
    with survival(3) as s:
        told("SIGSTOP", s.check(lambda: s.stop("gamma")))
        assert s.members() == ["alpha", "beta"]
        s.go_on("gamma")
        # It reads why only if it has not written to the closed link before: that discards what came last. The
        # head may also dial again before it looks at the old link.
        fenced = "lost: (alpha is gone|the head came back on a new link)|ended: alpha closed the link"
        wait_for(lambda: re.search(fenced, s.log("gamma")))
        wait_for(lambda: s.members() == ["alpha", "beta", "gamma"])  # it came back, and nothing ran
        assert s.run()["greedy"].tokens
        assert s.cluster.engine.stats().recoveries == 1


def test_a_link_that_is_cut_without_a_word() -> None:
    with survival(3, wires=("gamma",)) as s:
        wire = s.wires["gamma"]

        def cut() -> None:
            wire.block(True)
            wire.go_silent()

        told("cut link", s.check(cut))
        assert s.members() == ["alpha", "beta"]
        wire.block(False)
        wait_for(lambda: s.members() == ["alpha", "beta", "gamma"])
        assert s.run()["greedy"].tokens


def test_a_link_between_two_peers_that_loses_everything() -> None:
    with survival(3, wires=("gamma",)) as s:
        told("cut between peers", s.check(lambda: s.wires["gamma"].go_silent(2, 3)))
        assert s.cluster.engine.stats().recoveries == 1


def test_a_slow_member_that_can_be_spared() -> None:
    with survival(3, wires=("gamma",)) as s:

        def slow_down() -> None:
            s.wires["gamma"].delay_s = 3.0

        told("slow member", s.check(slow_down))
        assert s.members() == ["alpha", "beta"]


def test_a_slow_member_that_cannot_be_spared_is_waited_for() -> None:
    with survival(2, wires=("beta",), head_bytes=bytes_for(7)) as s:

        def slow_down() -> None:
            s.wires["beta"].delay_s = 1.5
            threading.Timer(8.0, lambda: setattr(s.wires["beta"], "delay_s", 0.0)).start()

        told("slow and needed", s.check(slow_down))
        assert s.members() == ["alpha", "beta"]
        assert s.cluster.engine.stats().recoveries == 0, "waiting is not losing"


def test_a_member_that_nobody_can_stand_in_for_restarts_and_comes_back() -> None:
    with survival(2, head_bytes=bytes_for(7)) as s:
        health: list[str] = []

        def restart() -> None:
            s.kill("beta")
            wait_for(lambda: "waiting for a member" in s.cluster.health()[1])
            health.append(s.cluster.health()[1])
            assert s.cluster.status().route.startswith("missing layers ")
            s.restart("beta")

        told("restart and rejoin, with a start of Python", s.check(restart))
        assert "missing layers" in health[0]
        assert "beta is gone" in health[0]
        assert s.cluster.health()[0]


def test_two_losses_in_a_row() -> None:
    with survival(4) as s:

        def kill_two() -> None:
            s.kill("beta")
            wait_for(lambda: s.cluster.engine.stats().recoveries == 1)
            s.kill("delta")

        told("two in a row", s.check(kill_two))
        assert s.members() == ["alpha", "gamma"]
        assert s.cluster.engine.stats().recoveries == 2


def test_two_losses_at_once() -> None:
    with survival(4) as s:

        def kill_two() -> None:
            s.kill("gamma")
            s.kill("beta")

        told("two at once", s.check(kill_two))
        assert s.members() == ["alpha", "delta"]


def test_a_member_that_hangs_while_the_loss_of_another_is_mended() -> None:
    with survival(4) as s:

        def kill_and_stop() -> None:
            s.kill("beta")
            s.stop("delta")

        told("one dies, one hangs", s.check(kill_and_stop))
        assert s.members() == ["alpha", "gamma"]


def test_a_loss_during_prefill() -> None:
    prompt = "Here are some words to read before you answer me. " * 120
    with survival(3) as s:
        expected = s.run(prompt=prompt)
        before = s.cluster.engine.stats().steps

        def kill_soon() -> None:
            wait_for(lambda: s.cluster.engine.stats().steps > before)
            s.kill("gamma")

        found = s.run(kill_soon, after=0, prompt=prompt, salt=b"another key")
        assert s.members() == ["alpha", "beta"]
        for name, stream in found.items():
            assert stream.tokens == expected[name].tokens


def test_the_loss_of_the_peer_that_owns_the_output() -> None:
    with survival(3, spans=["0:3", "4:7", "8:output"]) as s:
        assert s.cluster.status().stages[-1].output
        told("owner of the output", s.check(lambda: s.kill("gamma")))
        assert s.members() == ["alpha", "beta"]


def test_a_standby_takes_the_place_of_the_one_that_was_lost() -> None:
    with survival(3, head_bytes=bytes_for(7), standby=("gamma",)) as s:
        assert s.members() == ["alpha", "beta"]
        wait_for(lambda: "ready: stands by with layers" in s.log("gamma"))  # preloaded
        told("standby", s.check(lambda: s.kill("beta")))
        assert s.members() == ["alpha", "gamma"]


def test_without_anybody_to_stand_in_the_error_names_the_missing_layers() -> None:
    with survival(2, head_bytes=bytes_for(7), options={"recover_wait_s": 0.5}) as s:
        stream = s.start(PARAMS["greedy"], "Hi")
        wait_for(lambda: stream.tokens)
        s.kill("beta")
        assert stream.ended.wait(20)
        assert "missing layers" in str(stream.error)
        assert "beta is gone" in str(stream.error)
        ready, reason = s.cluster.health()
        assert not ready
        assert "missing layers" in reason
