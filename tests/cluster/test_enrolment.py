"""Invitations between two real sockets: who gets in, and everybody who must not."""

from __future__ import annotations

import contextlib
import os
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

from convoy.cluster.joining import NameTaken
from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.enrolment import OneTimeCertificate, Terms, newcomer_mac, to_sign
from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import HandshakeError, InviteError, LinkBroken, PeerUnreachable, RosterError
from convoy.transport.admission import AdmissionLimits
from convoy.transport.enrolment import dial_pinned, one_time_context, receive_enrolment
from convoy.transport.enrolment_listener import EnrolmentLimits
from convoy.trust.consumption import Consumption
from convoy.trust.roster import sign_roster
from convoy.wire.enrolment import MAGIC, EnrolmentType, Refusal, encode_enrolment, encode_proof
from support.invitations import Invitation, Joining, RawNewcomer, elsewhere, invitation

OPEN = AdmissionLimits(address_rate=1000, address_burst=1000, strangers_rate=1000, strangers_burst=1000)
LIMITS = EnrolmentLimits(admission=OPEN)


def assert_still_good(offer: Invitation) -> None:
    """Nothing that was tried used the invitation up: an honest newcomer gets in."""
    assert not offer.consumption.used
    joining = Joining(offer.token, name="honest")
    newcomer = offer.enrolment.wait()
    offer.accept(newcomer)
    assert joining.end().enrolled is not None


def test_a_newcomer_gets_the_signed_roster_and_both_screens_show_one_code(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        newcomer = offer.enrolment.wait()
        assert offer.consumption.used
        offer.accept(newcomer)
        joining.end()
    assert joining.error is None
    assert joining.enrolled is not None
    assert joining.codes == [newcomer.code]
    assert joining.enrolled.member.address == ("127.0.0.1", 7777)
    assert [m.name for m in joining.enrolled.signed.roster.members] == ["alpha", "beta"]


def test_the_secret_never_crosses_even_inside_tls(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        proof = raw.proof(raw.hello())
        said = raw.commitment + encode_proof(proof, raw.card)
        raw.close()
        assert offer.token.secret not in said


def test_a_replayed_proof_is_refused_and_uses_nothing_up(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        # Its name is taken, so the proof was right and the invitation is still good: the best to replay.
        first = RawNewcomer(offer.token, name="alpha")
        proof = first.proof(first.hello())
        first.send(proof)
        assert first.refusal() is Refusal.NAME_TAKEN
        again = RawNewcomer(offer.token, name="alpha")
        again.card, again.nonce = first.card, first.nonce
        again.hello()
        again.send(proof)
        assert again.refusal() is Refusal.FAILED
        assert_still_good(offer)


def test_a_wrong_secret_does_not_use_the_invitation_up(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        for _ in range(20):
            raw = RawNewcomer(offer.token, secret=os.urandom(16))
            raw.send(raw.proof(raw.hello()))
            assert raw.refusal() is Refusal.FAILED
        assert_still_good(offer)


def test_wrong_proofs_are_bounded_and_then_the_operator_is_told(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=replace(LIMITS, max_wrong_proofs=3)) as offer:
        for _ in range(3):
            raw = RawNewcomer(offer.token, secret=bytes(16))
            raw.send(raw.proof(raw.hello()))
            assert raw.refusal() is Refusal.FAILED
        with pytest.raises(InviteError, match="3 wrong proofs"):
            offer.enrolment.wait()
        assert "closed after too many wrong proofs" in str(Joining(offer.token).end().error)
        assert not offer.consumption.used


def test_another_name_than_committed_to_is_refused(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        challenge = raw.hello()
        raw.card = RawNewcomer(offer.token, name="other").card
        raw.send(raw.proof(challenge))
        assert raw.refusal() is Refusal.FAILED
        assert_still_good(offer)


def test_a_proof_without_the_tls_key_of_its_card_is_refused(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        challenge = raw.hello()
        proof = raw.proof(challenge)
        stranger = Identity.generate()
        by_stranger = stranger.sign_with_tls_key(to_sign(b"tls", raw.spoken))
        mac = newcomer_mac(offer.token.secret, raw.spoken, proof.identity_signature, by_stranger)
        raw.send(replace(proof, tls_signature=by_stranger, mac=mac))
        assert raw.refusal() is Refusal.FAILED
        assert_still_good(offer)


def test_of_two_newcomers_at_once_one_gets_in_and_the_other_is_told(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        both = [Joining(offer.token, name=name) for name in ("beta", "gamma")]
        newcomer = offer.enrolment.wait()
        loser = next(joining for joining in both if joining.name != newcomer.card.name).end()
        assert isinstance(loser.error, InviteError)
        assert "another machine came first" in loser.error.message
        assert not loser.codes
        offer.accept(newcomer)
        winner = next(joining for joining in both if joining is not loser).end()
        assert winner.enrolled is not None


def test_sixteen_raw_proofs_in_the_same_instant_use_it_once(tmp_path: Path) -> None:
    limits = replace(LIMITS, max_half_open=64, admission=replace(OPEN, max_half_open_per_address=64))
    with invitation(tmp_path, limits=limits) as offer:
        raws = [RawNewcomer(offer.token, name=f"m{number}") for number in range(16)]
        proofs = [(raw, raw.proof(raw.hello())) for raw in raws]
        threads = [threading.Thread(target=raw.send, args=(proof,)) for raw, proof in proofs]
        for thread in threads:
            thread.start()
        answers = [receive_enrolment(raw.stream) for raw in raws]
        for thread in threads:
            thread.join()
        assert [kind for kind, _ in answers].count(EnrolmentType.PENDING) == 1
        assert [body for kind, body in answers if kind is EnrolmentType.REFUSED] == [
            bytes([Refusal.CONSUMED])
        ] * 15


def test_a_used_invitation_stays_used_for_a_restarted_process(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        offer.accept(offer.enrolment.wait())
        joining.end()
    with invitation(tmp_path, like=offer.token) as restarted:
        error = Joining(restarted.token).end().error
        assert isinstance(error, InviteError)
        assert "used up" in error.message


def test_an_expired_invitation_lets_nobody_in(tmp_path: Path) -> None:
    with invitation(tmp_path, lifetime_s=0) as offer:
        with pytest.raises(InviteError, match="expired at"):
            offer.enrolment.wait()
        late = replace(offer.token, expires=offer.token.expires + 600, lifetime_s=600)
        error = Joining(late).end().error  # its own clock says that there is time
        assert isinstance(error, InviteError)
        assert error.message == "the invitation has expired there"
        assert "expired at" in str(Joining(offer.token).end().error)
        assert not offer.consumption.used


def test_a_proof_that_comes_after_the_expiry_is_late(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        challenge = raw.hello()
        offer.enrolment._until_s = time.monotonic()  # ten minutes later
        raw.send(raw.proof(challenge))
        assert raw.refusal() is Refusal.EXPIRED
        assert not offer.consumption.used


def test_a_taken_name_is_said_and_the_invitation_stays_good(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        error = Joining(offer.token, name="alpha").end().error
        assert isinstance(error, NameTaken)
        assert error.hint is not None
        assert "--name" in error.hint
        assert_still_good(offer)


def test_a_no_of_the_operator_reaches_the_newcomer(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        offer.enrolment.wait().refuse(Refusal.DECLINED)
        assert "the operator said no" in str(joining.end().error)
        assert offer.consumption.used


def test_an_operator_that_dies_after_the_proof_is_told_honestly(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        newcomer = offer.enrolment.wait()
        newcomer._stream.close()  # what the end of its process does
        error = joining.end().error
        assert isinstance(error, InviteError)
        assert "used up" in error.message
        assert offer.consumption.used


# A man in the middle.


class Middle:
    """A listener of the attacker's, with a certificate of its own, that hands TLS streams to ``play``."""

    def __init__(self) -> None:
        self.certificate = OneTimeCertificate.generate()
        self.fingerprint = certificate_fingerprint(self.certificate.certificate_der)
        self.context = one_time_context(self.certificate)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.heard = b""
        self.ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        sock, _ = self.server.accept()
        try:
            with self.context.wrap_socket(sock, server_side=True) as secured:
                self.heard = secured.recv(4096)
        except OSError:
            pass
        self.ended.set()


def test_a_listener_with_another_certificate_hears_nothing(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        middle = Middle()
        error = Joining(elsewhere(offer.token, middle.port)).end().error
        assert isinstance(error, HandshakeError)
        assert "another certificate" in error.message
        assert f"127.0.0.1:{middle.port}" in error.message
        assert middle.ended.wait(10)
        assert middle.heard == b""


def test_frames_relayed_from_another_certificate_do_not_hold(tmp_path: Path) -> None:
    """The victim was given a token with the attacker's fingerprint, and its proof is passed on as it is."""
    with invitation(tmp_path, limits=LIMITS) as offer:
        relayed = RawNewcomer(offer.token)
        relayed.terms = Terms(offer.token.secret, offer.token.invitation, os.urandom(32))
        relayed.send(relayed.proof(relayed.hello()))
        assert relayed.refusal() is Refusal.FAILED
        assert_still_good(offer)


def test_a_middle_man_with_the_token_gets_another_code_than_its_victim(tmp_path: Path) -> None:
    """It has the secret, gives the victim a token of its own making, and joins in the victim's name."""
    with invitation(tmp_path / "real") as real, invitation(tmp_path / "false") as false:
        victim = Joining(replace(false.token))
        seen_by_attacker = false.enrolment.wait()
        attacker = Joining(real.token, name=seen_by_attacker.card.name)
        shown_to_operator = real.enrolment.wait()
        assert shown_to_operator.card.name == "beta"
        assert victim.codes == [seen_by_attacker.code]
        assert shown_to_operator.code != seen_by_attacker.code
        shown_to_operator.refuse(Refusal.DECLINED)
        seen_by_attacker.refuse(Refusal.DECLINED)
        assert attacker.end().error is not None
        assert victim.end().error is not None


def test_an_attacker_with_the_token_cannot_choose_its_nonce_after_the_inviters(tmp_path: Path) -> None:
    """Grinding for the victim's code needs a nonce that is free once both others are known."""
    with invitation(tmp_path, limits=LIMITS) as offer:
        raw = RawNewcomer(offer.token)
        challenge = raw.hello()
        raw.nonce = os.urandom(32)
        raw.send(raw.proof(challenge))
        assert raw.refusal() is Refusal.FAILED
        assert not offer.consumption.used


def test_a_listener_without_the_secret_gets_no_code_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("convoy.cluster.enrolment.listener_mac", lambda *_: bytes(32))
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token).end()
        assert isinstance(joining.error, HandshakeError)
        assert "does not hold this invitation's secret" in joining.error.message
        assert joining.codes == []


def test_a_roster_whose_mac_is_wrong_is_refused(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        offer.accept(replace(offer.enrolment.wait(), _secret=bytes(16)))
        assert isinstance(joining.end().error, HandshakeError)
        assert joining.enrolled is None


def test_a_roster_of_another_operator_is_refused(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        newcomer = offer.enrolment.wait()
        offer.operator = OperatorKey.generate()
        offer.accept(newcomer)
        error = joining.end().error
        assert isinstance(error, RosterError)
        assert "another operator" in error.message
        assert joining.enrolled is None


def test_a_roster_without_the_newcomer_is_refused(tmp_path: Path) -> None:
    with invitation(tmp_path) as offer:
        joining = Joining(offer.token)
        offer.enrolment.wait().accept(sign_roster(offer.roster, offer.operator))
        assert "does not list this machine" in str(joining.end().error)


# Strangers that want to be a nuisance.


def plain_tls(offer: Invitation) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context.wrap_socket(socket.create_connection(offer.token.addresses[0], 10))


def hangs_up(sock: socket.socket) -> bool:
    """Whether the other end ends it; a TimeoutError is raised if it does not."""
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
    assert offer.enrolment.num_half_open == 0


@pytest.mark.parametrize(
    "frame",
    [
        MAGIC + b"\x00\x01\x01\x00\xff\xff\xff\xff",
        MAGIC + b"\x00\x01\x03\x00\x00\x00\x0c\x01",
        MAGIC + b"\x00\x02\x01\x00\x00\x00\x00\x20",
        MAGIC + b"\x00\x01\x05\x00\x00\x00\x00\x20" + bytes(32),
        b"CNVY\x04\x00\x00\x11" + bytes(17),
    ],
    ids=["endless hello", "oversized proof", "version 2", "a roster", "an opening of a link"],
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
                for byte in encode_enrolment(EnrolmentType.HELLO, bytes(32)) * 4:
                    sock.sendall(bytes([byte]))
                    if cut_off.wait(0.05):
                        break
        assert 0.9 < time.monotonic() - started < 4
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
            raw.send(raw.proof(raw.hello()))
            assert raw.refusal() is Refusal.FAILED
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
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
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
