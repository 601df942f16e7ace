"""Enrol by files: the members that may ask, the operator's checks, and the proof in an answer."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.crypto.tpm.endorsement import read_authorities
from convoy.crypto.tpm.structures import parse_public
from convoy.errors import AttestationError
from convoy.transport.member import Member
from convoy.trust.evidence import activation
from convoy.trust.evidence.activation import Request, accept, answer_for, challenge_for, check_request
from support.members import make_local_members
from support.tpm_vectors import IDENTITY, IDENTITY_KEY, recorded, recorded_parts, vectors

NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
AUTHORITIES = read_authorities(vectors()["authority_pem"].encode(), "ca.pem")
ATTESTATION, OTHER_MACHINE = recorded_parts("ecc")[0], recorded_parts("other_machine")[0]
BETA: Member = replace(make_local_members(("alpha", "beta"))[1].member, identity_key=IDENTITY_KEY)


def request(**changes: object) -> Request:
    certificate, endorsement = recorded("endorsement_certificate"), recorded("endorsement_public")
    made = Request("beta", IDENTITY_KEY, certificate, endorsement, ATTESTATION)
    return replace(made, **changes).signed(IDENTITY.sign)  # type: ignore[arg-type]


def test_a_member_that_opens_the_credential_is_enrolled() -> None:
    asked = request()
    assert check_request(asked, BETA, AUTHORITIES, NOW) == "CN=swtpm-localca"
    challenge, pending = challenge_for(asked)
    assert challenge.algorithm == "ecc"
    answer = answer_for("beta", IDENTITY_KEY, ATTESTATION, pending.secret)
    assert accept(answer, pending, BETA) == parse_public(ATTESTATION).key_der


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (lambda: request(identity_key=b"\1" * 32), "not of the beta that the roster lists"),
        (lambda: request(member="gamma"), "not of the beta that the roster lists"),
        (lambda: replace(request(), attestation=OTHER_MACHINE), "not signed by beta's identity key"),
        (lambda: replace(request(), signature=b""), "not signed by beta's identity key"),
        (lambda: request(attestation=recorded_parts("unrestricted")[0]), "not restricted"),
        (lambda: request(attestation=recorded("endorsement_public")), "attestation key is not sign"),
        (lambda: request(endorsement=ATTESTATION), "endorsement key is not decrypt"),
        (lambda: request(certificate=AUTHORITIES[0]), "certificate"),
        (lambda: request(attestation=bytes(2000)), "the limit is 1024"),
    ],
)
def test_a_request_that_cannot_be_right_gets_no_challenge(
    changed: Callable[[], Request], reason: str
) -> None:
    with pytest.raises(AttestationError, match=reason):
        check_request(changed(), BETA, AUTHORITIES, NOW)


def test_an_answer_without_the_secret_for_another_key_or_of_another_member_is_refused() -> None:
    _, pending = challenge_for(request())
    good = answer_for("beta", IDENTITY_KEY, ATTESTATION, pending.secret)
    for wrong in (
        answer_for("beta", IDENTITY_KEY, ATTESTATION, b"guess" + bytes(27)),
        answer_for("beta", IDENTITY_KEY, OTHER_MACHINE, pending.secret),
        answer_for("gamma", IDENTITY_KEY, ATTESTATION, pending.secret),
        replace(good, proof=good.proof[:-1]),
    ):
        with pytest.raises(AttestationError):
            accept(wrong, pending, BETA)
    with pytest.raises(AttestationError, match="not of the beta that was challenged"):
        accept(good, pending, replace(BETA, identity_key=b"\1" * 32))
    _, later = challenge_for(request())
    with pytest.raises(AttestationError, match="does not prove"):
        accept(good, later, BETA)


def test_every_file_reads_back_as_it_was_written() -> None:
    asked = request()
    challenge, pending = challenge_for(asked)
    answer = answer_for("beta", IDENTITY_KEY, ATTESTATION, pending.secret)
    assert activation.request_from_text(activation.request_to_text(asked)) == asked
    assert activation.challenge_from_text(activation.challenge_to_text(challenge)) == challenge
    assert activation.answer_from_text(activation.answer_to_text(answer)) == answer
    assert activation.pending_from_text(activation.pending_to_text(pending)) == pending
    assert pending.secret.hex() not in repr(pending)
    with pytest.raises(AttestationError, match="no attestation answer"):
        activation.answer_from_text(activation.request_to_text(asked))


@given(st.text(max_size=300))
def test_garbage_is_an_error(text: str) -> None:
    with pytest.raises(AttestationError):
        activation.request_from_text(text)


@pytest.mark.parametrize(
    "text",
    [
        "[attestation_answer]\nmember = 'beta'\nproof = 3",
        "[attestation_answer]\nmember = 'beta'\nproof = '?'",
        "[attestation_answer]\nmember = 'beta'\nproof = ''\nmore = ''",
        "#" * 40_000,
    ],
)
def test_a_file_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(AttestationError):
        activation.answer_from_text(text)
