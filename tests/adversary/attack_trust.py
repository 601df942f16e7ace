"""Rosters that are expired, foreign, old, forged or unsigned; connections that say they replace a link."""

from __future__ import annotations

import contextlib
import datetime
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tomli_w

from adversary.arena import Arena
from adversary.ledger import Row
from adversary.process import ROOT, WAIT_S, VictimProcess
from convoy.crypto.identity import OperatorKey
from convoy.trust.roster.roster import sign_roster

FAILURES = {"HandshakeError", "HandshakeLate", "Incompatible", "LinkBroken", "PeerUnreachable", "PeerBusy"}
DAY = datetime.timedelta(days=1)
only_both = pytest.mark.parametrize("arena", ["both"], indirect=True)


def kept_out(arena: Arena, row: Row, who: VictimProcess, named: set[str]) -> str:
    """Dial beta, check that no link comes of it, and return beta's reason."""
    arena.beta.now("refused"), arena.beta.now("link in")
    near = who.wait_either(("failed", "ended"), who.dial("beta", arena.beta.address))
    refused = arena.beta.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] in named, refused
    assert near["error"] in FAILURES, near
    assert not arena.beta.now("link in")
    who.stop()
    message: str = refused["message"]
    return message


@pytest.mark.attack("a roster of another cluster")
def test_a_roster_of_another_cluster_links_nobody(arena: Arena, row: Row) -> None:
    foreign = arena.under(replace(arena.roster, cluster_id="elsewhere"), "foreign")
    who = arena.start_as({"directory": str(foreign), "name": "alpha"})
    assert "names another cluster" in kept_out(arena, row, who, {"HandshakeError"})


@pytest.mark.attack("an expired roster")
def test_an_expired_roster_links_nobody(arena: Arena, row: Row) -> None:
    # The dialler's clock is right: it refuses itself. The listener's is: it refuses the dialler.
    who = arena.start_as({"name": "alpha", "clock_ahead_s": 31 * DAY.total_seconds()})
    near = who.wait("failed", who.dial("beta", arena.beta.address))
    row.tried(near["error"])
    assert near["error"] == "RosterError"
    assert "expired" in near["message"]
    who.stop()
    late = arena.start_as({"name": "beta", "clock_ahead_s": 31 * DAY.total_seconds()})
    near = arena.alpha.wait("failed", arena.alpha.dial("beta", late.address))
    refused = late.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] == "RosterError"
    assert near["error"] in FAILURES
    late.stop()


@pytest.mark.attack("a roster that is not valid yet")
def test_a_roster_of_the_future_links_nobody(arena: Arena, row: Row) -> None:
    who = arena.start_as({"name": "alpha", "clock_ahead_s": -DAY.total_seconds()})
    near = who.wait("failed", who.dial("beta", arena.beta.address))
    row.tried(near["error"])
    assert near["error"] == "RosterError"
    who.stop()


@pytest.mark.attack("another roster of the same epoch")
def test_two_rosters_of_one_epoch_are_loud_at_both_ends(arena: Arena, row: Row) -> None:
    other = arena.under(replace(arena.roster, expires=arena.roster.expires + DAY), "same epoch")
    who = arena.start_as({"directory": str(other), "name": "alpha"})
    assert "another roster of the same epoch" in kept_out(arena, row, who, {"Incompatible"})


@pytest.mark.attack("an older epoch of the roster")
def test_an_older_roster_is_never_adopted_and_its_holder_gets_the_newer(arena: Arena, row: Row) -> None:
    old = arena.under(replace(arena.roster, epoch=arena.roster.epoch - 1), "older")
    who = arena.start_as({"directory": str(old), "name": "alpha"})
    key = who.dial("beta", arena.beta.address)
    found = who.wait_either(("link", "failed"), key)
    assert found["event"] == "link", found
    arena.beta.tell("state")
    assert arena.beta.wait("state")["epoch"] == arena.roster.epoch
    who.tell("state")
    assert who.wait("state")["epoch"] == arena.roster.epoch
    row.tried("the newer one is adopted")
    path = old / "roster.toml"
    arena.beta.tell("offer", path=str(path))
    offered = arena.beta.wait("offered")
    row.tried(offered["error"])
    assert offered["error"] == "RosterError"
    who.stop()


@pytest.mark.attack("a newer roster by another operator")
def test_a_forged_newer_roster_is_not_adopted(arena: Arena, row: Row) -> None:
    usurper = OperatorKey.generate()
    forged = arena.under(replace(arena.roster, epoch=99), "forged", operator=usurper)
    who = arena.start_as({"directory": str(forged), "name": "alpha", "operator": usurper.public_key.hex()})
    kept_out(arena, row, who, {"Incompatible"})
    arena.beta.tell("state")
    assert arena.beta.wait("state")["epoch"] == arena.roster.epoch


@pytest.mark.attack("rosters of no use sent in a link")
@pytest.mark.parametrize(
    "kind", ["older", "forged", "unsigned", "foreign", "same epoch", "garbage", "empty", "known"]
)
def test_a_member_that_keeps_sending_bad_rosters_loses_its_link(
    arena: Arena, row: Row, kind: str, tmp_path: Path
) -> None:
    ours = arena.roster
    signed = {
        "older": sign_roster(replace(ours, epoch=1), arena.operator),
        "forged": sign_roster(replace(ours, epoch=99), OperatorKey.generate()),
        "unsigned": sign_roster(ours, arena.operator).partition(b"\n[signature]")[0],
        "foreign": sign_roster(replace(ours, epoch=99, cluster_id="elsewhere"), arena.operator),
        "same epoch": sign_roster(replace(ours, expires=ours.expires + DAY), arena.operator),
        "garbage": os.urandom(1 << 20),
        "empty": b"",
        "known": sign_roster(ours, arena.operator),
    }[kind]
    path = tmp_path / "bad"
    path.write_bytes(signed)
    link = arena.link()
    ended = None
    for number in range(30):
        arena.alpha.tell("roster", key=link.near, path=str(path))
        arena.alpha.tell("steps", key=link.near, numbers=[number])  # so that each is sent, none replaced
        ended = arena.beta.wait_briefly("ended", link.far, 0.02)
        if ended is not None:
            break
    ended = ended or link.far_end()
    link.near_end()
    row.tried(ended["error"])
    assert ended["error"] == "FrameError", ended
    arena.beta.tell("state")
    assert arena.beta.wait("state")["epoch"] == ours.epoch


@pytest.mark.attack("a connection that replaces another's link, or none")
@pytest.mark.parametrize("which", ["unknown", "of another member", "ended"])
def test_a_link_is_replaced_only_by_its_own_ends(arena: Arena, row: Row, which: str) -> None:
    link = arena.link()
    named = next(e["id"] for e in arena.alpha.heard if e["event"] == "link" and e["key"] == link.near)
    who = arena.alpha
    if which == "unknown":
        named = os.urandom(16).hex()
    elif which == "of another member":
        who = arena.start("gamma")
    else:
        link.middle.cut(0)
        link.ends()
    arena.beta.now("refused"), arena.beta.now("link in")
    key = f"replacing {which}"
    who.tell("dial", key=key, peer="beta", port=arena.beta.port, timeout_s=WAIT_S, replaces=named)
    refused = arena.beta.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] == "HandshakeError", refused
    assert "replace" in refused["message"]
    assert not arena.beta.now("link in")
    if which != "ended":
        link.steps(5)
        assert link.arrived()["step"] == 5
        link.middle.cut(0)
        link.ends()
    if who is not arena.alpha:
        who.stop()


@pytest.mark.attack("replay across a replacement")
def test_a_frame_from_before_a_replacement_opens_no_more(arena: Arena, row: Row) -> None:
    alpha, beta = (arena.start(n, replace_after_records=12, replace_retry_s=0.05) for n in ("alpha", "beta"))
    middle = arena.middle(target=beta.address)
    near = alpha.dial("beta", middle.address)
    alpha.wait("link", near)
    far = beta.wait("link in")["key"]
    before = len(middle.up(0).seen)
    recorded = b""
    fresh = None
    for number in range(200):
        alpha.tell("steps", key=near, numbers=[number])
        assert beta.wait("arrived", far)["step"] == number
        recorded = recorded or middle.up(0).wait_seen(before + 1)[before]
        if middle.num_connections >= 4:
            fresh = fresh or number
            if number > fresh + 20:
                break
    assert fresh is not None, "the connections were not replaced"
    # The connection in use is among them, or among those of a replacement that is still under way.
    injected = 2
    for _ in range(int(WAIT_S)):
        for connection in range(injected, middle.num_connections, 2):
            middle.up(connection).inject(recorded)
            injected = connection + 2
        with contextlib.suppress(AssertionError):
            ended = beta.wait("ended", far, timeout_s=1)
            break
    else:
        pytest.fail("beta kept the link")
    row.tried(ended["error"])
    assert ended["error"] in ({"SealError"} if arena.is_bare else {"LinkBroken"}), ended
    alpha.wait("ended", near)
    for victim in (alpha, beta):
        assert not victim.crashes
        victim.stop()


@only_both
@pytest.mark.attack("an unsigned, foreign or expired roster at a start", layer="both")
def test_a_member_does_not_start_with_a_roster_that_is_not_its_operators(
    arena: Arena, row: Row, tmp_path: Path
) -> None:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    expired = replace(arena.roster, not_before=now - 40 * DAY, expires=now - 10 * DAY)
    honest = sign_roster(arena.roster, arena.operator)
    files = {
        "unsigned": honest.partition(b"\n[signature]")[0],
        "foreign": sign_roster(arena.roster, OperatorKey.generate()),
        "expired": sign_roster(expired, arena.operator),
        "changed": honest.replace(b"epoch = 7", b"epoch = 8"),
    }
    running = {}
    for kind, signed in files.items():
        (tmp_path / kind).write_bytes(signed)
        tables = {
            "cluster": {
                "name": "beta",
                "identity": str(arena.directory / "beta"),
                "roster": str(tmp_path / kind),
                "operator_key": arena.operator.public_key.hex(),
            },
            "listen": {"host": "127.0.0.1", "port": 0},
        }
        config = tmp_path / f"{kind}.toml"
        config.write_text(tomli_w.dumps(tables))
        running[kind] = subprocess.Popen(
            [sys.executable, "-m", "convoy", "join", "--config", str(config)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
    for kind, process in running.items():
        _, said = process.communicate(timeout=60)
        row.tried("RosterError (the command ends)")
        assert process.returncode not in {0, None}, kind
        assert "Traceback" not in said
        assert "roster" in said, (kind, said)
