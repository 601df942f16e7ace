"""An invitation's listener among strangers: garbage, silence, slow writers, wrong addresses."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.enrolment import OneTimeCertificate
from convoy.errors import HandshakeError, InviteError, LinkBroken, PeerUnreachable
from convoy.transport.admission import AdmissionLimits
from convoy.transport.listen.enrolment_listener import EnrolmentLimits
from convoy.transport.listen.enrolment_tls import dial_pinned, one_time_context, receive_enrolment
from convoy.transport.ports import free_port
from convoy.trust.consumption import Consumption
from convoy.wire.messages.enrolment import MAGIC, EnrolmentType, encode_enrolment
from support.invitations import (
    LIMITS,
    OPEN,
    Invitation,
    Joining,
    Middle,
    RawNewcomer,
    assert_still_good,
    invitation,
)
from support.waiting import wait_until


def plain_tls(offer: Invitation) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(offer.token.addresses[0], 10))


def hangs_up(sock: socket.socket) -> bool:
    """Return whether the other end hangs up. Raises TimeoutError if it does not."""
    try:
        while sock.recv(4096):
            pass
    except TimeoutError:
        raise
    except OSError:
        pass
    return True


@settings(max_examples=30, deadline=None)
@given(garbage=st.binary(min_size=12, max_size=600))
def test_garbage_inside_tls_ends_that_connection_alone(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes
) -> None:
    with invitation(tmp_path_factory.mktemp("garbage"), limits=LIMITS) as offer:
        with plain_tls(offer) as sock:
            sock.sendall(garbage)
            assert hangs_up(sock)
        assert not offer.consumption.used
    wait_until(lambda: offer.enrolment.num_half_open == 0)  # the place is given back after the hang-up


@pytest.mark.parametrize(
    "frame",
    [
        MAGIC + b"\x00\x02\x01\x00\xff\xff\xff\xff",
        MAGIC + b"\x00\x02\x03\x00\x00\x00\x0c\x01",
        MAGIC + b"\x00\x01\x01\x00\x00\x00\x00\x20",
        MAGIC + b"\x00\x02\x05\x00\x00\x00\x00\x20" + bytes(32),
        b"CNVY\x04\x00\x00\x11" + bytes(17),
    ],
    ids=["endless hello", "oversized proof", "version 1", "a roster", "an opening of a link"],
)
def test_a_frame_that_is_not_for_a_listener_ends_its_connection(tmp_path: Path, frame: bytes) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        with plain_tls(offer) as sock:
            sock.sendall(frame)
            assert hangs_up(sock)
        assert_still_good(offer)


def test_a_writer_of_one_byte_at_a_time_is_cut_off_at_the_total_deadline(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=replace(LIMITS, proof_timeout_s=1.0)) as offer:
        started = time.monotonic()
        with plain_tls(offer) as sock:
            cut_off = threading.Event()

            def read() -> None:
                hangs_up(sock)
                cut_off.set()

            threading.Thread(target=read, daemon=True).start()
            with contextlib.suppress(OSError):
                # They would take 15 s.
                for byte in encode_enrolment(EnrolmentType.HELLO, bytes(64)) * 4:
                    sock.sendall(bytes([byte]))
                    if cut_off.wait(0.05):
                        break
                else:
                    pytest.fail("the other end read every byte")
        assert time.monotonic() - started > 0.9
        assert_still_good(offer)


def test_connections_that_say_nothing_hold_a_bounded_number_of_places(tmp_path: Path) -> None:
    limits = replace(LIMITS, max_half_open=8, admission=replace(OPEN, max_half_open_per_address=8))
    with invitation(tmp_path, limits=limits) as offer:
        silent = [socket.create_connection(offer.token.addresses[0], 10) for _ in range(200)]
        assert offer.enrolment.num_half_open <= 8
        assert_still_good(offer)  # silence gives way
        for sock in silent:
            sock.close()


def test_a_stranger_that_tries_too_often_is_turned_away_before_tls(tmp_path: Path) -> None:
    limits = EnrolmentLimits(admission=AdmissionLimits(address_rate=0.001, address_burst=3))
    with invitation(tmp_path, limits=limits) as offer:
        for _ in range(3):
            raw = RawNewcomer(offer.token, secret=bytes(16))
            raw.say_hello()
            assert raw.hung_up()
        with pytest.raises((PeerUnreachable, HandshakeError)):
            RawNewcomer(offer.token)


def test_a_newcomer_that_proves_itself_and_vanishes_uses_the_invitation_up(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        raw.send(raw.proof(raw.hello()))
        assert receive_enrolment(raw.stream)[0] is EnrolmentType.PENDING
        newcomer = offer.enrolment.wait()
        raw.close()
        hand_over = partial(newcomer.accept, bytes(1024 * 1024))  # more than any socket buffers
        with pytest.raises(LinkBroken):
            hand_over()
        assert offer.consumption.used


def test_a_full_disk_lets_nobody_in(tmp_path: Path) -> None:
    (tmp_path / "invites").write_text("not a directory")
    with invitation(tmp_path, limits=LIMITS) as offer:
        joining = Joining(offer.token)
        with pytest.raises(Exception, match="cannot"):
            offer.enrolment.wait()
        assert "gave up" in str(joining.end().error)
        assert not Consumption(tmp_path / "invites", offer.token.id).used


def test_no_address_that_answers_is_said_with_each_reason(tmp_path: Path) -> None:
    port = free_port()
    with invitation(tmp_path) as offer:
        token = replace(offer.token, addresses=(("127.0.0.1", port), ("::1", port)))
        error = Joining(token).end().error
        assert isinstance(error, PeerUnreachable)
        assert f"127.0.0.1:{port} (connection refused), [::1]:{port} (" in error.message


def test_a_second_address_is_tried_where_the_first_leads_elsewhere(tmp_path: Path) -> None:
    middle = Middle()
    with invitation(tmp_path, before=(("127.0.0.1", middle.port),)) as offer:
        joining = Joining(offer.token)
        offer.accept(offer.enrolment.wait())
        assert joining.end().enrolled is not None


def test_the_one_time_key_is_nowhere_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    one_time_context(OneTimeCertificate.generate())
    assert list(tmp_path.iterdir()) == []


def test_a_pinned_dial_shows_no_certificate_of_its_own(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        stream, local = dial_pinned(offer.token.addresses[0], offer.token.fingerprint, time.monotonic() + 5)
        assert local == "127.0.0.1"
        stream.close()


def test_a_newcomer_that_hung_up_while_the_operator_thought_is_not_let_in(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        raw.send(raw.proof(raw.hello()))
        newcomer = offer.enrolment.wait()
        newcomer.require_there()
        raw.close()
        with pytest.raises(InviteError, match="went away before it was let in"):
            newcomer.require_there()


def test_looking_whether_a_newcomer_is_there_leaves_it_room_to_be_let_in(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        joining = Joining(offer.token)
        newcomer = offer.enrolment.wait()
        newcomer.require_there()
        offer.accept(newcomer)
        assert joining.end().enrolled is not None
