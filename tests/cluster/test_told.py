"""The lines of a head's log about members that come and go: one each, with layers, route and seconds."""

from __future__ import annotations

import re
import time

import pytest

from cluster.recovery.test_recovery import SOURCE, ask, scene, small, stages
from convoy.cluster.options import HeadOptions
from convoy.cluster.recovery.recovery import StageRecovery
from convoy.cluster.running import RunningCluster
from convoy.cluster.status import AbsentStatus
from convoy.errors import StageLost
from support.cluster import MEMBER
from support.waiting import wait_until


def told(caplog: pytest.LogCaptureFixture, kind: str) -> list[str]:
    """Return the head's lines of a kind. Its peers log in this process too, sooner or later than the head."""
    found = [record for record in list(caplog.records) if record.name != "convoy.cluster.peer.peer"]
    return [text for record in found if (text := record.getMessage()).startswith(f"{kind}: ")]


def test_a_loss_and_what_becomes_of_it_are_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        gone = s.join("gamma")
        began_s = time.time()
        cluster = s.serve()
        lost = cluster.status().stages[2]
        assert lost.member == "gamma"
        assert cluster.status().absent == []
        gone.stop()
        wait_until(lambda: told(caplog, "recovered"))
        [line] = told(caplog, "lost")
        assert re.fullmatch(rf"lost: gamma, which held layers? {lost.start}(-{lost.end - 1})?: .+", line)
        [line] = told(caplog, "recovered")
        assert re.fullmatch(
            r"recovered: alpha 0:\d,output -> beta \d:\d -> alpha, \d+\.\d\d s after the loss "
            r"\(\d+\.\d\d s of it to find out\)",
            line,
        )
        [absent] = cluster.status().absent
        assert absent.name == "gamma"
        assert absent.since_unix_s is not None
        assert began_s <= absent.since_unix_s <= time.time()
        s.join("gamma")
        wait_until(lambda: told(caplog, "in use"))
        assert cluster.status().absent == []
        assert told(caplog, "joined") == ["joined: gamma is here again"]
        [line] = told(caplog, "in use")
        assert line.startswith("in use: alpha ")
        assert line.endswith(" s (gamma is here)")
        assert "gamma" in line.removesuffix("(gamma is here)")
        cluster.close()
        assert len(told(caplog, "lost")) == 1, "an end in order is no loss"


def test_a_standby_comes_and_goes_with_a_line_each(caplog: pytest.LogCaptureFixture) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        cluster = s.serve(wait_s=3.0)
        assert cluster.status().absent == [AbsentStatus("gamma", None)]
        standby = s.join("gamma", standby=True)
        wait_until(lambda: told(caplog, "joined"))
        assert told(caplog, "joined") == ["joined: gamma is here, as a standby"]
        assert cluster.status().absent == []
        wait_until(lambda: told(caplog, "standby"))
        held = cluster.status().stages[1]
        layers = f"{held.start}-{held.end - 1}"
        assert told(caplog, "standby") == [f"standby: gamma has loaded layers {layers}"]
        standby.stop()
        wait_until(lambda: told(caplog, "lost"))
        assert told(caplog, "lost")[0].startswith("lost: gamma, which held no layers: ")
        assert stages(cluster) == ["alpha", "beta"]
        assert not told(caplog, "recovered"), "nothing had to be mended"


@pytest.mark.long
def test_the_time_of_a_recovery_runs_from_the_loss_over_searches_in_vain(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=small(), recover_wait_s=0.5)
        recovery = cluster.engine.recovery
        assert isinstance(recovery, StageRecovery)
        # Each search in vain, which takes half a second, ends with an error of its own.
        vain: list[StageLost] = []

        def has_given_up(times: int) -> bool:
            last = recovery.gave_up
            if last is not None and not any(last is one for one in vain):
                vain.append(last)
            return len(vain) >= times

        s.peers["beta"].stop()
        began_s = time.monotonic()
        wait_until(lambda: has_given_up(3))
        searched_s = time.monotonic() - began_s
        s.join("beta")
        wait_until(lambda: told(caplog, "recovered"))
        wait_until(lambda: cluster.health()[0])
        assert ask(cluster) == "17"
        [line] = told(caplog, "recovered")
        found = re.search(r", (\S+) s after the loss \((\S+) s of it", line)
        assert found is not None
        assert searched_s > 1.0
        assert float(found[1]) >= searched_s
        assert float(found[2]) < float(found[1]) / 2
        assert len(told(caplog, "lost")) == 1
        first, then = told(caplog, "waiting")
        assert re.fullmatch(
            r"waiting: missing layers .+, beta is gone; .+; for a member, at most 0\.5 s", first
        )
        assert then == "waiting: any member that comes is used, however late"


def test_everyone_who_arrives_at_the_start_is_told_with_who_is_missing() -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        arrivals: list[tuple[str, list[str], float]] = []
        cluster = RunningCluster.start(
            s.me,
            SOURCE,
            HeadOptions(MEMBER, wait_s=40, num_blocks=32),
            network=s.network,
            on_arrival=lambda *arrival: arrivals.append(arrival),
        )
        s.stack.callback(cluster.close)
        (first, missing, left_s), (last, nobody, _) = arrivals
        assert {first, last} == {"beta", "gamma"}
        assert missing == [last]
        assert nobody == []
        assert 0 < left_s <= 40
