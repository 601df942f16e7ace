"""The inner handshake over streams: what each end is told when it fails."""

from __future__ import annotations

import os
import ssl
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.cipher import local_ciphers
from convoy.crypto.handshake import Initiator
from convoy.crypto.identity import Identity
from convoy.errors import ConvoyError, HandshakeError, HandshakeLate, Incompatible, LinkBroken, PeerError
from convoy.testing.streams import RecordedStream, memory_stream_pair
from convoy.transport.link import establish
from convoy.transport.link.establish import (
    broke_off,
    establish_initiator,
    establish_responder,
    receive_opening,
    send_opening,
)
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember
from convoy.transport.options import LinkOptions
from convoy.wire.frame import encode_handshake
from convoy.wire.messages.control import FrameType
from support.members import make_local_members, with_roster

ALPHA, BETA, GAMMA = make_local_members(["alpha", "beta", "gamma"])
OPTIONS = LinkOptions()


def both(
    me: LocalMember = ALPHA,
    other: LocalMember = BETA,
    *,
    calls: str = "beta",
    versions: tuple[int, int] = (1, 1),
    link_ids: tuple[bytes, bytes] | None = None,
) -> tuple[Link | ConvoyError, Link | ConvoyError, bytes]:
    """Return how the handshake ended for (dialler, listener), and the listener's bytes."""
    there, back = memory_stream_pair(), memory_stream_pair()
    said = bytearray()
    answer = RecordedStream(back[1], said)
    for stream in (*there, *back):
        stream.set_deadline(time.monotonic() + 5)
    ids = link_ids or (b"i" * 16, b"i" * 16)
    ends: dict[int, Link | ConvoyError] = {}

    def respond() -> None:
        try:
            peer = other.roster.member("alpha")
            ends[1] = establish_responder(
                other, peer, ids[1], (answer, there[1]), OPTIONS, version=versions[1]
            )
        except ConvoyError as error:
            ends[1] = error

    thread = threading.Thread(target=respond)
    thread.start()
    try:
        peer = me.roster.member(calls)
        ends[0] = establish_initiator(me, peer, ids[0], (there[0], back[0]), OPTIONS, version=versions[0])
    except ConvoyError as error:
        ends[0] = error
    thread.join()
    return ends[0], ends[1], bytes(said)


def test_both_ends_get_a_link_to_each_other() -> None:
    mine, theirs, _ = both()
    assert isinstance(mine, Link)
    assert isinstance(theirs, Link)
    assert (mine.peer, theirs.peer) == ("beta", "alpha")


@pytest.mark.parametrize("versions", [(1, 2), (2, 1), (7, 1)])
def test_another_version_is_named_at_both_ends(versions: tuple[int, int]) -> None:
    mine, theirs, _ = both(versions=versions)
    for error, peer, other, own in ((mine, "beta", 1, 0), (theirs, "alpha", 0, 1)):
        assert isinstance(error, Incompatible)
        theirs_said = f"{peer} speaks protocol version {versions[other]}"
        assert error.message == f"{theirs_said}, and this member speaks version {versions[own]}"


@pytest.mark.parametrize("epochs", [(2, 1), (1, 2)])
def test_with_another_epoch_both_ends_know_both_epochs(epochs: tuple[int, int]) -> None:
    ends = [with_roster(m, replace(m.roster, epoch=e)) for m, e in zip((ALPHA, BETA), epochs, strict=True)]
    mine, theirs, _ = both(*ends)
    assert isinstance(mine, Link)
    assert isinstance(theirs, Link)
    assert (mine.facts.epoch, mine.facts.peer_epoch) == epochs
    assert (theirs.facts.peer_epoch, theirs.facts.epoch) == epochs


def test_another_roster_of_the_same_epoch_is_loud_at_both_ends() -> None:
    roster = replace(BETA.roster, members=BETA.roster.members[:2])
    mine, theirs, _ = both(ALPHA, with_roster(BETA, roster))
    for error in (mine, theirs):
        assert isinstance(error, Incompatible)
        assert "another roster of the same epoch 1" in error.message


def test_the_other_side_hears_the_same_whatever_the_cause() -> None:
    impostor = _stolen(ALPHA)
    causes = {
        "link": both(link_ids=(b"a" * 16, b"b" * 16)),
        "responder": both(calls="gamma"),
        "version": both(versions=(2, 1)),
    }
    said = {cause: outcome[2] for cause, outcome in causes.items()}
    assert len(set(said.values())) == 1, said
    mine, theirs, answer = both(impostor)
    assert answer.endswith(said["link"])
    assert isinstance(mine, Link | HandshakeError)
    assert isinstance(theirs, HandshakeError)


def _stolen(victim: LocalMember) -> LocalMember:
    """Return a thief of the TLS key alone: the victim's name and certificate, another identity key."""
    thief = object.__new__(LocalMember)
    object.__setattr__(thief, "name", victim.name)
    object.__setattr__(thief, "identity", GAMMA.identity)
    object.__setattr__(thief, "roster", victim.roster)
    return thief


def test_a_stolen_tls_key_without_the_identity_key_gets_no_link() -> None:
    _, theirs, _ = both(_stolen(ALPHA))
    assert isinstance(theirs, HandshakeError)
    assert theirs.message == "the signature is not by the identity key of alpha"


def test_a_listener_with_a_stolen_tls_key_gets_no_link() -> None:
    mine, theirs, _ = both(ALPHA, _stolen(BETA))
    assert isinstance(mine, HandshakeError)
    assert mine.message == "the signature is not by the identity key of beta"
    assert isinstance(theirs, HandshakeError)
    assert theirs.message == "alpha refused the handshake"


def test_a_member_that_answers_for_another_gets_no_link() -> None:
    mine, theirs, _ = both(ALPHA, GAMMA, calls="beta")
    assert isinstance(mine, HandshakeError)
    assert isinstance(theirs, HandshakeError)
    assert "another responder, expected gamma" in theirs.message


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_garbage_instead_of_a_handshake_is_an_error_of_the_peer(garbage: bytes, framed: bool) -> None:
    there, back = memory_stream_pair(), memory_stream_pair()
    there[0].send_all(encode_handshake(FrameType.HANDSHAKE_1, garbage) if framed else garbage)
    there[0].close()
    with pytest.raises(PeerError):
        establish_responder(BETA, BETA.roster.member("alpha"), os.urandom(16), (back[1], there[1]), OPTIONS)


def test_a_silent_stranger_is_given_up_at_the_deadline() -> None:
    there, back = memory_stream_pair(), memory_stream_pair()
    there[1].set_deadline(time.monotonic() + 0.1)
    with pytest.raises(HandshakeError, match="nothing came before the deadline"):
        establish_responder(BETA, BETA.roster.member("alpha"), os.urandom(16), (back[1], there[1]), OPTIONS)


@pytest.mark.parametrize(
    "frame",
    [
        encode_handshake(FrameType.HANDSHAKE_1, bytes(17)),
        encode_handshake(FrameType.OPENING, bytes(16)),
        encode_handshake(FrameType.OPENING, b"\2" + bytes(16)),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_a_connection_that_begins_otherwise_is_refused(frame: bytes) -> None:
    near, far = memory_stream_pair()
    near.send_all(frame)
    near.close()
    with pytest.raises(PeerError):
        receive_opening(far)


def test_an_opening_says_link_and_direction() -> None:
    near, far = memory_stream_pair()
    send_opening(near, 1, b"l" * 16)
    assert receive_opening(far) == (1, b"l" * 16)


@pytest.mark.parametrize("end", ["dialling", "listening"])
def test_a_refusal_takes_no_time_beyond_the_deadline_of_the_handshake(end: str) -> None:
    class Deaf:
        """Pass nothing in or out; the deadline that was given stands."""

        def __init__(self) -> None:
            self.num_closed = 0

        def send_all(self, _data: bytes | bytearray | memoryview) -> None:
            raise LinkBroken("the other end took nothing before the deadline")

        def recv_into(self, _buffer: memoryview) -> int:
            raise LinkBroken("nothing came before the deadline")

        def set_deadline(self, at_s: float | None) -> None:
            raise AssertionError(f"the deadline was moved to {at_s}")

        def close(self) -> None:
            self.num_closed += 1

    streams = (Deaf(), Deaf())
    begin, peer = (establish_initiator, BETA) if end == "dialling" else (establish_responder, GAMMA)
    with pytest.raises(HandshakeError, match="broke off"):
        begin(ALPHA, peer.member, b"i" * 16, streams, OPTIONS)
    assert [stream.num_closed for stream in streams] == [1, 1]


def test_a_bug_in_the_handshake_closes_both_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def sign(_self: Identity, _data: bytes) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(Identity, "sign", sign)
    there, back = memory_stream_pair(), memory_stream_pair()
    context = establish.handshake_context(ALPHA, ALPHA.member, BETA.member, b"i" * 16, 1)
    m1 = Initiator(context, ALPHA.identity.sign, local_ciphers()).create_1()
    there[0].send_all(encode_handshake(FrameType.HANDSHAKE_1, m1))
    with pytest.raises(ZeroDivisionError):
        establish_responder(BETA, ALPHA.member, b"i" * 16, (back[1], there[1]), OPTIONS)
    for stream in (there[0], back[0]):
        assert stream.recv_into(memoryview(bytearray(1))) == 0


def test_a_silence_or_a_hang_up_may_be_a_busy_machines_and_an_alert_is_a_refusal() -> None:
    alert = LinkBroken("tls: unknown ca")
    alert.__cause__ = ssl.SSLError(1, "alert unknown ca")
    for error in (LinkBroken("nothing came before the deadline"), LinkBroken("the other end is gone")):
        assert type(broke_off("beta", error)) is HandshakeLate
    assert type(broke_off("beta", alert)) is HandshakeError


def test_a_listener_that_closes_without_an_answer_may_be_dialled_again() -> None:
    there, back = memory_stream_pair(), memory_stream_pair()
    back[1].close()
    with pytest.raises(HandshakeLate, match="closed the connection during the handshake"):
        establish_initiator(ALPHA, BETA.member, os.urandom(16), (there[0], back[0]), OPTIONS)
