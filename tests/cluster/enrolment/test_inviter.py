"""Invitations between two real sockets: the machine that gets in, and all that must not."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.cluster.enrolment.newcomer import EnrolmentRequest, NameTaken, join_by_token
from convoy.crypto.enrolment import MAX_UNPROVED_CHALLENGES, Terms, newcomer_mac, to_sign
from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import HandshakeError, InviteError, LinkBroken, RosterError
from convoy.transport.listen.enrolment_tls import receive_enrolment
from convoy.trust.roster.roster import sign_roster
from convoy.wire.messages.enrolment import EnrolmentType, Refusal, encode_proof
from support.invitations import (
    LIMITS,
    OPEN,
    Joining,
    Middle,
    RawNewcomer,
    assert_still_good,
    elsewhere,
    invitation,
)


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


def test_an_address_of_another_member_is_refused_with_what_to_do_and_uses_nothing_up(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        taken = EnrolmentRequest("beta", None, offer.roster.member("alpha").address[1])
        with pytest.raises(InviteError, match=r"another member .* has the address 127\.0\.0\.1:7") as caught:
            join_by_token(offer.token, Identity.generate(), taken, lambda _code: None)
        assert "--port PORT" in str(caught.value.hint)
        assert_still_good(offer)


def test_a_hello_without_the_secret_is_hung_up_on_and_not_counted(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        for _ in range(3 * MAX_UNPROVED_CHALLENGES):
            raw = RawNewcomer(offer.token, secret=os.urandom(16))
            raw.say_hello()
            assert raw.hung_up()
        assert_still_good(offer)


def test_a_newcomer_that_is_hung_up_on_learns_what_to_look_at(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        error = Joining(replace(offer.token, secret=bytes(16))).end().error
        assert isinstance(error, LinkBroken)
        assert "did not answer" in error.message
        assert "same version of convoy" in str(error.hint)


def test_a_stranger_gets_one_answer_whether_the_invitation_is_open_or_used(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        offer.consumption.consume("another machine")
        stranger = RawNewcomer(offer.token, secret=bytes(16))
        stranger.say_hello()
        assert stranger.hung_up()


def test_challenges_without_a_proof_close_the_invitation_and_the_operator_is_told(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=LIMITS) as offer:
        for _ in range(MAX_UNPROVED_CHALLENGES):
            raw = RawNewcomer(offer.token)
            raw.hello()
            raw.close()
        with pytest.raises(InviteError, match="20 connections with its token got a challenge"):
            offer.enrolment.wait()
        late = RawNewcomer(offer.token)
        late.say_hello()
        assert late.refusal() is Refusal.BUSY
        assert not offer.consumption.used


def test_connections_at_once_get_no_more_challenges_than_one_by_one(tmp_path: Path) -> None:
    limits = replace(LIMITS, max_unproved_challenges=3)
    with invitation(tmp_path, limits=limits) as offer:
        open_ones = [RawNewcomer(offer.token) for _ in range(3)]
        challenges = [raw.hello() for raw in open_ones]
        fourth = RawNewcomer(offer.token)
        fourth.say_hello()
        assert fourth.refusal() is Refusal.BUSY
        # One of the three is the honest one: it still gets in.
        open_ones[1].send(open_ones[1].proof(challenges[1]))
        assert offer.enrolment.wait().card.name == "beta"


def test_wrong_proofs_count_and_right_ones_do_not(tmp_path: Path) -> None:
    with invitation(tmp_path, limits=replace(LIMITS, max_unproved_challenges=3)) as offer:
        for _ in range(5):
            # Its name is taken: the proof is right, and the invitation stays good.
            right = RawNewcomer(offer.token, name="alpha")
            right.send(right.proof(right.hello()))
            assert right.refusal() is Refusal.NAME_TAKEN
        for _ in range(3):
            wrong = RawNewcomer(offer.token)
            challenge = wrong.hello()
            wrong.nonce = bytes(32)
            wrong.send(wrong.proof(challenge))
            assert wrong.refusal() is Refusal.FAILED
        with pytest.raises(InviteError, match="3 connections with its token"):
            offer.enrolment.wait()
        assert "too many connections without a right proof" in str(Joining(offer.token).end().error)
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
        late = RawNewcomer(offer.token)  # its own clock says that there is time
        late.say_hello()
        assert late.refusal() is Refusal.EXPIRED
        assert "expired at" in str(Joining(offer.token).end().error)
        assert not offer.consumption.used


def test_a_proof_that_comes_after_the_expiry_is_late(tmp_path: Path) -> None:
    passed_s = 0.0
    with invitation(tmp_path, limits=LIMITS, clock=lambda: time.monotonic() + passed_s) as offer:
        raw = RawNewcomer(offer.token)
        challenge = raw.hello()
        passed_s = 600.0
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
        newcomer.stream.close()  # what the end of its process does
        error = joining.end().error
        assert isinstance(error, InviteError)
        assert "used up" in error.message
        assert offer.consumption.used


# A man in the middle.


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
        own, seen = relayed.terms, Terms(offer.token.secret, offer.token.invitation, os.urandom(32))
        relayed.terms = seen
        relayed.say_hello()
        assert relayed.hung_up()
        relayed = RawNewcomer(offer.token)
        relayed.terms = own
        challenge = relayed.hello()
        relayed.terms = seen
        relayed.send(relayed.proof(challenge))
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
    monkeypatch.setattr("convoy.cluster.enrolment.inviter.listener_mac", lambda *_: bytes(32))
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
