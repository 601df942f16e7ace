"""From nobody to the first step: who is lost meanwhile, and who is sought from when on."""

from __future__ import annotations

import pytest

from cluster.test_recovery import SOURCE, ask, scene, small, stages
from convoy.cluster.head import Head
from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.errors import LinkBroken, PeerUnreachable, StepError
from convoy.model.stage import Stage
from support.cluster import MEMBER, PeerThread
from support.waiting import wait_until


def dies_once_while_it_loads(monkeypatch: pytest.MonkeyPatch, peers: dict[str, PeerThread]) -> None:
    """As with beta's machine: its connections end without a word."""
    load, died = Stage.load, list[str]()

    def load_or_die(source: object, mine: object, *args: object, **kept: object) -> Stage:
        if mine.member == "beta" and not died:  # type: ignore[attr-defined]
            died.append("beta")
            head = peers["beta"].peer._head
            assert head is not None
            for stream in head._streams:
                stream.close()
            raise StepError("this machine is gone")
        return load(source, mine, *args, **kept)  # type: ignore[arg-type]

    monkeypatch.setattr(Stage, "load", load_or_die)


def test_a_peer_that_dies_while_it_loads_for_the_first_plan_is_planned_around(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        s.join("gamma")
        dies_once_while_it_loads(monkeypatch, s.peers)
        cluster = s.serve()
        assert "the cluster starts without beta" in caplog.text
        assert ask(cluster) == "17"
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])  # it is sought, and used


def test_a_peer_that_dies_while_it_loads_and_cannot_be_spared_ends_the_bring_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with scene("beta") as s:
        s.join("beta")
        dies_once_while_it_loads(monkeypatch, s.peers)
        with pytest.raises(LinkBroken, match="the link to beta ended"):
            s.serve(member=small())


def test_whoever_comes_before_anybody_listens_is_told_of_once_somebody_does() -> None:
    with scene("beta") as s:
        gone = s.join("beta")
        head = Head(s.me, SOURCE, HeadOptions(MEMBER, wait_s=5, num_blocks=32), s.network)
        s.stack.callback(head.close)
        head.bring_up()
        assert list(head.links) == ["beta"]
        head.links.clear()
        assert list(head.links) == ["beta"], "what was handed out is a copy"
        gone.stop()
        wait_until(lambda: not head.links)
        back, joined = s.join("beta"), list[str]()
        assert back.events.empty(), "nobody dials before the hooks are set"
        head.seek(lambda: None, joined.append)
        wait_until(lambda: joined == ["beta"])


def test_a_member_that_is_absent_is_done_without_and_used_when_it_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with scene("beta", "gamma") as s:
        s.join("beta")
        cluster = s.serve(wait_s=1.0)
        assert "gamma at 127.0.0.1:7002 did not answer within 1 s; the cluster starts without" in caplog.text
        assert stages(cluster) == ["alpha", "beta"]
        assert ask(cluster) == "17"
        s.join("gamma")
        wait_until(lambda: stages(cluster) == ["alpha", "beta", "gamma"])


@pytest.mark.parametrize(
    "options",
    [
        {"member": small(1)},
        {"spans": {"alpha": "0:0,output", "beta": "1:2", "gamma": "3:3"}},
    ],
)
def test_a_member_that_is_absent_and_needed_is_named_with_its_address(options: dict[str, object]) -> None:
    with scene("beta", "gamma") as s:
        s.peers["beta"] = beta = PeerThread(s.members["beta"], PeerOptions(small(1)), s.network)
        s.stack.callback(beta.stop)
        with pytest.raises(PeerUnreachable, match=r"gamma at 127\.0\.0\.1:7002 did not answer within 1 s"):
            s.serve(wait_s=1.0, **options)
