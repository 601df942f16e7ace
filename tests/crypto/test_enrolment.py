"""Enrolment over bytes: vectors, a second computation from docs/protocol.md alone, and what must fail."""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from convoy.crypto.certificate import certificate_key
from convoy.crypto.enrolment import (
    EnrolmentProof,
    Terms,
    check_commitment,
    check_hello,
    check_listener_mac,
    check_mac,
    check_signatures,
    code,
    commit,
    hello_mac,
    make_proof,
    transcript,
)
from convoy.crypto.identity import Identity
from convoy.errors import HandshakeError, InviteError
from convoy.trust.invite import decode_token
from convoy.wire.messages.enrolment import (
    PREAMBLE_BYTES,
    decode_card,
    decode_proof,
    encode_card,
    encode_proof,
)
from vectors.generate_enrolment import NEGATIVE, ROSTER, newcomer, seed

VECTOR = json.loads((Path(__file__).parents[1] / "vectors" / "enrolment_v2.json").read_text(encoding="utf-8"))
TOKEN = decode_token(VECTOR["token"])
TERMS = Terms(TOKEN.secret, TOKEN.invitation, TOKEN.fingerprint)
LABEL = b"convoy enrolment v1"


def body(kind: str) -> bytes:
    return bytes.fromhex(VECTOR["frames"][kind])[PREAMBLE_BYTES:]


PROOF, CARD = decode_proof(body("PROOF"))
COMMITMENT = body("HELLO")[:32]
SPOKEN = bytes.fromhex(VECTOR["transcript"])


def identity() -> Identity:
    return newcomer(bytes.fromhex(VECTOR["newcomer_certificate"]))


def judge(proof: EnrolmentProof, card: bytes, terms: Terms = TERMS, commitment: bytes = COMMITMENT) -> None:
    """Check all that an inviter checks, in its order."""
    spoken = transcript(terms, commitment, body("CHALLENGE"), proof.nonce, card)
    check_mac(terms.secret, spoken, proof)
    check_commitment(commitment, proof.nonce, card)
    said = decode_card(card)
    check_signatures(spoken, proof, said.identity_key, certificate_key(said.certificate_der))


def test_we_say_and_show_what_the_vector_says() -> None:
    assert commit(seed("newcomer nonce"), CARD) == COMMITMENT
    assert COMMITMENT + hello_mac(TERMS, COMMITMENT) == body("HELLO")
    assert check_hello(TERMS, body("HELLO")) == COMMITMENT
    spoken = transcript(TERMS, COMMITMENT, body("CHALLENGE"), seed("newcomer nonce"), CARD)
    assert spoken == SPOKEN
    made = make_proof(TERMS, identity(), seed("newcomer nonce"), spoken)
    assert encode_proof(made, CARD) == body("PROOF")
    assert code(TOKEN.secret, spoken) == VECTOR["code"]
    assert TOKEN.id == VECTOR["invitation_id"]
    check_listener_mac(TOKEN.secret, spoken, b"pending", body("PENDING"))
    check_listener_mac(TOKEN.secret, spoken, ROSTER, body("ACCEPTED")[:32])
    judge(PROOF, CARD)


# What must fail, by the vector's own list: each entry names the error and a word of its text.


def changed_token() -> None:
    text: str = VECTOR["token"]
    decode_token(text[:60] + ("a" if text[60] != "a" else "b") + text[61:])


def next_version() -> None:
    decode_token(VECTOR["token"].replace("convoy1", "convoy2"))


def other_hello(**changed: bytes) -> None:
    check_hello(replace(TERMS, **changed), body("HELLO"))


def other_hello_commitment() -> None:
    check_hello(TERMS, bytes(32) + body("HELLO")[32:])


def other_secret() -> None:
    judge(PROOF, CARD, Terms(bytes(16), TOKEN.invitation, TOKEN.fingerprint))


def other_certificate() -> None:
    judge(PROOF, CARD, Terms(TOKEN.secret, TOKEN.invitation, bytes(32)))


def other_card() -> None:
    said = decode_card(CARD)
    card = encode_card(type(said)("gamma", said.address, said.identity_key, said.certificate_der))
    spoken = transcript(TERMS, COMMITMENT, body("CHALLENGE"), PROOF.nonce, card)
    judge(make_proof(TERMS, identity(), PROOF.nonce, spoken), card)


def other_key(which: str) -> None:
    """Judge a proof by an attacker that has the secret and one of the two keys."""
    thief = Identity.generate()
    said = decode_card(CARD)
    if which == "identity":
        card = encode_card(type(said)("beta", said.address, thief.public_key, said.certificate_der))
    else:
        card = encode_card(type(said)("beta", said.address, said.identity_key, thief.tls_certificate_der))
    commitment = commit(PROOF.nonce, card)
    spoken = transcript(TERMS, commitment, body("CHALLENGE"), PROOF.nonce, card)
    judge(make_proof(TERMS, identity(), PROOF.nonce, spoken), card, commitment=commitment)


def other_roster() -> None:
    check_listener_mac(TOKEN.secret, SPOKEN, ROSTER + b".", body("ACCEPTED")[:32])


CASES = {
    "one letter of the token changed": changed_token,
    "a token of version 2": next_version,
    "a HELLO under another secret": lambda: other_hello(secret=bytes(16)),
    "a HELLO for another invitation": lambda: other_hello(invitation=bytes(32)),
    "a HELLO for another listener": lambda: other_hello(fingerprint=bytes(32)),
    "a HELLO with another commitment": other_hello_commitment,
    "another secret": other_secret,
    "another listener's certificate": other_certificate,
    "another card than committed to": other_card,
    "another identity key": lambda: other_key("identity"),
    "another TLS key": lambda: other_key("tls"),
    "a roster that is not the inviter's": other_roster,
}


def test_the_file_lists_every_negative_case() -> None:
    assert VECTOR["negative"] == NEGATIVE
    assert {case["what"] for case in NEGATIVE} == CASES.keys()


@pytest.mark.parametrize("case", NEGATIVE, ids=lambda case: case["what"])
def test_what_is_not_the_vector_fails_as_the_file_says(case: dict[str, str]) -> None:
    errors = {"InviteError": InviteError, "HandshakeError": HandshakeError}
    with pytest.raises(errors[case["error"]], match=case["match"]):
        CASES[case["what"]]()


@given(st.integers(0, len(body("PROOF")) * 8 - 1))
def test_a_flipped_bit_anywhere_in_a_proof_is_refused(bit: int) -> None:
    changed = bytearray(body("PROOF"))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HandshakeError, match="secret"):
        judge(*decode_proof(bytes(changed)))


@given(st.integers(0, len(body("HELLO")) * 8 - 1))
def test_a_flipped_bit_anywhere_in_a_hello_is_refused(bit: int) -> None:
    changed = bytearray(body("HELLO"))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HandshakeError, match="HELLO"):
        check_hello(TERMS, bytes(changed))


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=32, max_size=32))
def test_codes_are_eight_digits_in_two_groups(secret: bytes, spoken: bytes) -> None:
    first, second = code(secret, spoken).split(" ")
    assert len(first) == len(second) == 4
    assert (first + second).isdigit()


# From here on the page alone: HMAC, SHA-256 and Ed25519, nothing of ours.


def lp(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def hmac256(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def mac(secret: bytes, role: bytes, *parts: bytes) -> bytes:
    key = hmac256(hmac256(LABEL, secret), lp(LABEL, b"mac", role) + b"\x01")
    return hmac256(key, lp(LABEL, role, *parts))


def read_token(text: str) -> tuple[bytes, bytes, bytes]:
    """Return the fingerprint, the secret and the hash of the rest, by the page's table."""
    digits = "abcdefghijklmnopqrstuvwxyz234567"
    number = 0
    for letter in text.removeprefix("convoy1"):
        number = number * 32 + digits.index(letter)
    num_bits = 5 * len(text.removeprefix("convoy1"))
    data = (number >> num_bits % 8).to_bytes(num_bits // 8, "big")
    content, checksum = data[:-4], data[-4:]
    assert sha256(lp(LABEL, b"checksum", content))[:4] == checksum
    head, secret, tail = content[:74], content[74:90], content[90:]
    return head[42:], secret, sha256(lp(LABEL, b"invitation", head, tail))


def test_an_independent_computation_agrees() -> None:
    fingerprint, secret, invitation = read_token(VECTOR["token"])
    listener = bytes.fromhex(VECTOR["listener_certificate"])
    assert fingerprint == sha256(listener)
    assert invitation.hex() == VECTOR["invitation"]
    hello, challenge, proof = body("HELLO")[:32], body("CHALLENGE"), body("PROOF")
    assert mac(secret, b"hello", invitation, fingerprint, hello) == body("HELLO")[32:]
    nonce, by_identity, by_tls, seal, card = (
        proof[:32],
        proof[32:96],
        proof[96:160],
        proof[160:192],
        proof[192:],
    )
    assert sha256(lp(LABEL, b"commitment", nonce, card)) == hello
    t = sha256(lp(LABEL, b"transcript", invitation, sha256(listener), hello, challenge, nonce, card))
    assert t.hex() == VECTOR["transcript"]
    assert mac(secret, b"newcomer", t, by_identity, by_tls) == seal
    own = bytes.fromhex(VECTOR["newcomer_certificate"])
    at = card.index(own)
    identity_key = card[at - 36 : at - 4]
    Ed25519PublicKey.from_public_bytes(identity_key).verify(
        by_identity, lp(LABEL, b"signature", b"identity", t)
    )
    Ed25519PublicKey.from_public_bytes(certificate_key(own)).verify(
        by_tls, lp(LABEL, b"signature", b"tls", t)
    )
    assert mac(secret, b"inviter", t, sha256(b"pending")) == body("PENDING")
    assert mac(secret, b"inviter", t, sha256(ROSTER)) == body("ACCEPTED")[:32]
    digits = int.from_bytes(mac(secret, b"code", t), "big") % 10**8
    assert f"{digits:08d}" == VECTOR["code"].replace(" ", "")
    assert mac(secret, b"id", invitation)[:16].hex() == VECTOR["invitation_id"]
