"""Write enrolment_v2.json: `python tests/vectors/generate_enrolment.py` from the root of the repository.

Every value comes from a fixed seed, so a second run writes the same file. `tests/crypto/test_enrolment.py`
recomputes it twice, with our code and with a second computation written from docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from convoy.crypto.certificate import certificate_fingerprint, make_certificate
from convoy.crypto.enrolment import (
    Terms,
    code,
    commit,
    hello_mac,
    invitation_id,
    listener_mac,
    make_proof,
    transcript,
)
from convoy.crypto.identity import Identity
from convoy.trust.invite import Token
from convoy.wire.messages.enrolment import (
    EnrolmentCard,
    EnrolmentType,
    Refusal,
    encode_card,
    encode_enrolment,
    encode_proof,
)

OUT = Path(__file__).parent / "enrolment_v2.json"
ROSTER = b"the signed roster, whatever it says"
NEGATIVE = [
    {"what": "one letter of the token changed", "error": "InviteError", "match": "damaged"},
    {"what": "a token of version 2", "error": "InviteError", "match": "does not begin with convoy1"},
    {"what": "a HELLO under another secret", "error": "HandshakeError", "match": "HELLO"},
    {"what": "a HELLO for another invitation", "error": "HandshakeError", "match": "HELLO"},
    {"what": "a HELLO for another listener", "error": "HandshakeError", "match": "HELLO"},
    {"what": "a HELLO with another commitment", "error": "HandshakeError", "match": "HELLO"},
    {"what": "another secret", "error": "HandshakeError", "match": "secret"},
    {"what": "another listener's certificate", "error": "HandshakeError", "match": "another listener"},
    {"what": "another card than committed to", "error": "HandshakeError", "match": "committed"},
    {"what": "another identity key", "error": "HandshakeError", "match": "signature"},
    {"what": "another TLS key", "error": "HandshakeError", "match": "signature"},
    {"what": "a roster that is not the inviter's", "error": "HandshakeError", "match": "inviting machine"},
]


def seed(name: str, size: int = 32) -> bytes:
    """Make fixed bytes for a name."""
    return hashlib.shake_256(b"convoy enrolment vectors v1 " + name.encode()).digest(size)


def key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(seed(name))


def newcomer(certificate_der: bytes) -> Identity:
    return Identity(key("newcomer identity"), key("newcomer tls"), certificate_der)


def main() -> None:
    # A certificate's serial number is random, so one that was made before is kept.
    kept = json.loads(OUT.read_text(encoding="utf-8")) if OUT.exists() else None
    listener, own = (
        [bytes.fromhex(kept[name]) for name in ("listener_certificate", "newcomer_certificate")]
        if kept
        else [make_certificate(key(name)) for name in ("listener", "newcomer tls")]
    )
    identity = newcomer(own)
    token = Token(
        "vectors",
        key("operator").public_key().public_bytes_raw(),
        certificate_fingerprint(listener),
        (("192.0.2.7", 40123), ("2001:db8::7", 40123), ("alpha.example", 443)),
        expires=1_800_000_000,
        lifetime_s=600,
        secret=seed("secret", 16),
    )
    card = encode_card(EnrolmentCard("beta", ("192.0.2.8", 7777), identity.public_key, own))
    nonce, challenge = seed("newcomer nonce"), seed("inviter nonce")
    terms = Terms(token.secret, token.invitation, token.fingerprint)
    commitment = commit(nonce, card)
    spoken = transcript(terms, commitment, challenge, nonce, card)
    proof = encode_proof(make_proof(terms, identity, nonce, spoken), card)
    accepted = listener_mac(token.secret, spoken, ROSTER) + ROSTER
    frames = {
        EnrolmentType.HELLO: commitment + hello_mac(terms, commitment),
        EnrolmentType.CHALLENGE: challenge,
        EnrolmentType.PROOF: proof,
        EnrolmentType.PENDING: listener_mac(token.secret, spoken, b"pending"),
        EnrolmentType.ACCEPTED: accepted,
        EnrolmentType.REFUSED: bytes([Refusal.CONSUMED]),
    }
    vector = {
        "provenance": "tests/vectors/generate_enrolment.py; from seeds, but for the certificates' serials",
        "listener_certificate": listener.hex(),
        "newcomer_certificate": own.hex(),
        "token": token.encode(),
        "invitation": token.invitation.hex(),
        "invitation_id": invitation_id(token.secret, token.invitation),
        "transcript": spoken.hex(),
        "code": code(token.secret, spoken),
        "frames": {kind.name: encode_enrolment(kind, body).hex() for kind, body in frames.items()},
        "negative": NEGATIVE,
    }
    OUT.write_text(json.dumps(vector, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
