"""Attacks on a listener by strangers: none lasts, and none harms others."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adversary.arena import Arena
from adversary.ledger import Row
from adversary.process import WAIT_S, VictimProcess
from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.identity import Identity
from convoy.transport.link.establish import TO_DIALLER, TO_LISTENER
from convoy.wire.frame import HEADER_BYTES, encode_handshake
from convoy.wire.messages.control import FrameType
from support.listener_process import Crowd

REFUSALS = {"HandshakeError", "Incompatible", "FrameError", "FrameTooLong", "PeerUnreachable", "PeerBusy"}
STRANGERS = [f"127.0.{i}.{j}" for i in range(1, 5) for j in range(1, 51)]
NUM_SILENT = 10_000
MAX_GROWTH_BYTES = 64 << 20
EXAMPLES = settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
only_inner = pytest.mark.parametrize("arena", ["inner alone"], indirect=True)
only_both = pytest.mark.parametrize("arena", ["both"], indirect=True)


def send_raw(arena: Arena, data: bytes) -> socket.socket:
    sock = socket.create_connection(arena.beta.address)
    try:
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
    except OSError:
        pass  # hung up on in the middle of it
    return sock


@pytest.mark.attack("garbage on a new connection")
@EXAMPLES
@given(garbage=st.binary(min_size=1, max_size=3000))
def test_garbage_is_refused_by_name(arena: Arena, row: Row, garbage: bytes) -> None:
    arena.beta.now("refused")
    sock = send_raw(arena, garbage)
    refused = arena.beta.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] in REFUSALS
    sock.close()


def said_name(arena: Arena, name: str = "alpha") -> bytes:
    return certificate_fingerprint(arena.member(name).member.certificate_der)


@only_inner
@pytest.mark.attack("garbage in place of a handshake message", layer="inner alone")
@EXAMPLES
@given(garbage=st.binary(min_size=1, max_size=3000), framed=st.booleans(), opened=st.booleans())
def test_garbage_of_one_that_tls_let_in_is_refused_by_name(
    arena: Arena, row: Row, garbage: bytes, framed: bool, opened: bool
) -> None:
    arena.beta.now("refused")
    said = encode_handshake(FrameType.HANDSHAKE_1, garbage) if framed else garbage
    link_id = bytes(16)
    openings = [
        encode_handshake(FrameType.OPENING, bytes([direction]) + link_id)
        for direction in (TO_LISTENER, TO_DIALLER)
    ]
    before = [said_name(arena) + (opening if opened else b"") for opening in openings]
    socks = [send_raw(arena, before[0] + said), send_raw(arena, before[1] + (b"" if opened else said))]
    refused = arena.beta.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] in REFUSALS
    for sock in socks:
        sock.close()


@only_inner
@pytest.mark.attack("garbage in a standing link", layer="inner alone")
@EXAMPLES
@given(garbage=st.binary(min_size=HEADER_BYTES, max_size=400))
def test_garbage_in_a_link_ends_it_by_name(arena: Arena, row: Row, garbage: bytes) -> None:
    link = arena.link()
    link.up.inject(garbage)
    link.middle.cut(0)
    far = link.far_end()
    link.near_end()
    row.tried(far["error"])
    assert far["error"] in {
        "FrameError",
        "FrameTooLong",
        "SealError",
        "LinkBroken",
        "HandshakeError",
        "Incompatible",
    }
    assert link.all_arrived() == []


def dial_as_a_head(who: VictimProcess, beta: VictimProcess) -> str:
    """Dial beta again until there is a link, and return its key.

    On a busy machine a listener may not come to an honest handshake before its deadline.
    """
    until_s = time.monotonic() + WAIT_S
    while True:
        key = who.dial("beta", beta.address)
        found = who.wait_either(("link", "failed"), key)
        if found["event"] == "link":
            return key
        assert found["error"] in {"HandshakeLate", "PeerUnreachable", "PeerBusy"}, found
        assert time.monotonic() < until_s, found


@only_both
@pytest.mark.attack("10,000 connections that say nothing", layer="both")
@pytest.mark.parametrize("hosts", [STRANGERS, ["127.0.0.9"]], ids=["many addresses", "one address"])
def test_silent_crowds_hold_no_memory_and_keep_no_member_out(
    arena: Arena, row: Row, hosts: list[str]
) -> None:
    beta = arena.start_as({"name": "beta"}, admission=None, max_half_open=64, handshake_timeout_s=5.0)
    before = beta.rss_bytes()
    crowd = Crowd(beta.address, hosts, NUM_SILENT // 2, per_s=4000)
    peak = before
    dials = 0
    while not crowd.done.is_set() or not dials:
        peak = max(peak, beta.rss_bytes())
        arena.alpha.tell("close", key=dial_as_a_head(arena.alpha, beta))
        dials += 1
        crowd.done.wait(0.3)
    crowd.close()
    assert crowd.opened == NUM_SILENT // 2
    row.tries += crowd.opened - 1
    row.tried("closed; a member links meanwhile")
    assert peak - before < MAX_GROWTH_BYTES
    assert not beta.crashes
    beta.stop()


@pytest.mark.attack("slow one-byte writers")
def test_a_byte_at_a_time_holds_a_place_no_longer_than_a_handshake(arena: Arena, row: Row) -> None:
    beta = arena.start_as({"name": "beta"}, handshake_timeout_s=1.5)
    # At a byte every 0.1 s its record of 16 KiB is whole after 27 minutes: a deadline alone ends it before.
    greeting = b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + bytes(600)
    crowd = Crowd(beta.address, ["127.0.0.9"], 40, per_s=1000, greeting=greeting, byte_every_s=0.1)
    errors = [beta.wait("refused")["error"] for _ in range(40)]
    crowd.close()
    for error in errors:
        row.tried(error)
    assert set(errors) <= REFUSALS
    assert not beta.crashes
    beta.stop()


@pytest.mark.attack("slow one-byte writer inside a link")
def test_a_frame_that_comes_a_byte_at_a_time_holds_a_link_no_longer_than_silence(
    arena: Arena, row: Row
) -> None:
    alpha, beta = (arena.start(name, ping_after_s=0.4, gone_after_s=1.5) for name in ("alpha", "beta"))
    middle = arena.middle(target=beta.address)
    near = alpha.dial("beta", middle.address)
    alpha.wait("link", near)
    far = beta.wait("link in")["key"]

    def dribble(unit: bytes) -> tuple[bytes, ...]:
        for i in range(len(unit)):
            middle.up(0).inject(unit[i : i + 1])
            time.sleep(0.1)  # the attack is the slowness
        return ()

    middle.up(0).tamper = dribble
    alpha.tell("steps", key=near, numbers=[1])
    ended = beta.wait("ended", far)
    row.tried(ended["error"])
    assert ended["error"] == "LinkBroken"
    for victim in (alpha, beta):
        assert not victim.crashes
        victim.stop()


# Keys that were stolen, and names that are another's.


def thief(arena: Arena, tmp_path: Path, *, tls_of: str | None, identity_of: str | None) -> VictimProcess:
    """Play alpha with only one of its keys, or with none."""
    directory = tmp_path / "thief"
    own = Identity.generate()
    own.save(directory / "keys")
    if tls_of is not None:
        for name in ("tls.key", "tls.crt"):
            (directory / "keys" / name).write_bytes((arena.directory / tls_of / name).read_bytes())
    if identity_of is not None:
        key = arena.directory / identity_of / "identity.key"
        (directory / "keys" / "identity.key").write_bytes(key.read_bytes())
    (directory / "roster.toml").write_bytes((arena.directory / "roster.toml").read_bytes())
    return arena.start_as({"directory": str(directory), "name": "alpha", "identity": "keys", "liar": True})


def check_kept_out(arena: Arena, row: Row, who: VictimProcess, named: set[str]) -> str:
    """Check that it dials beta and gets no link. Return beta's reason."""
    arena.beta.now("refused"), arena.beta.now("link in")
    key = who.dial("beta", arena.beta.address)
    near = who.wait_either(("failed", "ended"), key)
    refused = arena.beta.wait("refused")
    row.tried(refused["error"])
    assert refused["error"] in named, refused
    assert near["error"] in {*REFUSALS, "HandshakeLate", "LinkBroken"}, near
    assert not arena.beta.now("link in")
    assert not who.crashes
    who.stop()
    message: str = refused["message"]
    return message


@pytest.mark.attack("a stolen TLS key without the identity key")
def test_the_tls_key_alone_makes_nobody_a_member(arena: Arena, row: Row, tmp_path: Path) -> None:
    message = check_kept_out(
        arena, row, thief(arena, tmp_path, tls_of="alpha", identity_of=None), {"HandshakeError"}
    )
    assert message == "the signature is not by the identity key of alpha"


@only_both
@pytest.mark.attack("a stolen identity key without the TLS key", layer="both")
def test_the_identity_key_alone_makes_nobody_a_member(arena: Arena, row: Row, tmp_path: Path) -> None:
    check_kept_out(arena, row, thief(arena, tmp_path, tls_of=None, identity_of="alpha"), {"HandshakeError"})


@pytest.mark.attack("a listener with a stolen TLS key")
def test_a_listener_with_a_stolen_tls_key_is_found_out(arena: Arena, row: Row, tmp_path: Path) -> None:
    directory = tmp_path / "thief"
    Identity.generate().save(directory / "keys")
    for name in ("tls.key", "tls.crt"):
        (directory / "keys" / name).write_bytes((arena.directory / "beta" / name).read_bytes())
    (directory / "roster.toml").write_bytes((arena.directory / "roster.toml").read_bytes())
    false_beta = arena.start_as(
        {"directory": str(directory), "name": "beta", "identity": "keys", "liar": True}
    )
    near = arena.alpha.wait("failed", arena.alpha.dial("beta", false_beta.address))
    row.tried(near["error"])
    assert near["error"] == "HandshakeError"
    assert near["message"] == "the signature is not by the identity key of beta"
    false_beta.stop()


@pytest.mark.attack("claim another member's identity")
@pytest.mark.parametrize("claimed", ["alpha", "beta", "nobody"])
def test_a_member_that_says_it_is_another_is_refused(arena: Arena, row: Row, claimed: str) -> None:
    if claimed == "nobody" and not arena.is_bare:
        claimed = "alpha"
    if claimed == "nobody":
        arena.beta.now("refused")
        sock = send_raw(arena, b"\x5a" * 32)
        refused = arena.beta.wait("refused")
        row.tried(refused["error"])
        assert refused["error"] == "HandshakeError"
        sock.close()
        return
    liar = arena.start_as({"name": claimed, "identity": "gamma", "liar": True})
    if claimed == "beta":
        near = liar.wait_either(("failed", "ended"), liar.dial("alpha", arena.alpha.address))
        row.tried(near["error"])
        assert near["error"] in {"HandshakeError", "HandshakeLate", "PeerUnreachable", "PeerBusy"}
        liar.stop()
        return
    check_kept_out(arena, row, liar, {"HandshakeError"})


@pytest.mark.attack("a member in a listener's place")
def test_a_member_that_answers_for_another_gets_no_link(arena: Arena, row: Row) -> None:
    liar = arena.start_as({"name": "beta", "identity": "gamma", "liar": True})
    near = arena.alpha.wait("failed", arena.alpha.dial("beta", liar.address))
    row.tried(near["error"])
    assert near["error"] == "HandshakeError", near
    liar.stop()
