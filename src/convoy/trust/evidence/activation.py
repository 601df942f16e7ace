"""Enrol an attestation key: the four steps between a member and its operator, as small text files.

    member    request     EK certificate, both public areas, signed by the identity key
    operator  challenge   a secret that only that TPM opens, and only for that attestation key
    member    answer      a proof of the secret
    operator  (accepts)   the key goes into the roster

The operator keeps a `PendingActivation` between challenge and acceptance; it is secret.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import secrets
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from convoy.crypto.identity import verify
from convoy.crypto.keys import prefixed
from convoy.crypto.tpm.credential import SECRET_BYTES, activation_proof, check_proof, make_credential
from convoy.crypto.tpm.endorsement import check_endorsement
from convoy.crypto.tpm.structures import (
    check_attestation_key,
    check_endorsement_key,
    key_algorithm,
    parse_public,
)
from convoy.errors import AttestationError, HandshakeError
from convoy.transport.member import Member

MAX_FILE_BYTES = 32 * 1024

_LABEL = b"convoy attestation v1 request"
_AGAIN = "make the request again on that machine: convoy attest new"
_REQUEST, _CHALLENGE, _ANSWER, _PENDING = (
    f"attestation_{word}" for word in ("request", "challenge", "answer", "pending")
)


@dataclass(frozen=True, slots=True)
class Request:
    """Ask for a member's key to be enrolled. Nothing in it is believed before `check_request`."""

    member: str
    identity_key: bytes
    certificate: bytes
    endorsement: bytes
    attestation: bytes
    signature: bytes = b""

    def signed_bytes(self) -> bytes:
        """Return the bytes that the identity key signs, to claim the attestation key as this member's."""
        parts = (self.certificate, self.endorsement, self.attestation)
        return prefixed(_LABEL, self.member.encode(), self.identity_key, *parts)

    def signed(self, sign: Callable[[bytes], bytes]) -> Request:
        """Return the same request, signed."""
        rest = (self.certificate, self.endorsement, self.attestation)
        return Request(self.member, self.identity_key, *rest, sign(self.signed_bytes()))


@dataclass(frozen=True, slots=True)
class ActivationChallenge:
    """Hold the credential; ``algorithm`` tells the member which of its keys it is for."""

    member: str
    algorithm: str
    id_object: bytes
    encrypted_secret: bytes


@dataclass(frozen=True, slots=True)
class ActivationReply:
    """Hold the proof that the credential was opened."""

    member: str
    proof: bytes


@dataclass(frozen=True, slots=True)
class PendingActivation:
    """Hold the operator's own half: the member, its keys, and the secret that the proof must show."""

    member: str
    identity_key: bytes
    attestation: bytes
    secret: bytes = field(repr=False)


def check_request(
    request: Request, member: Member, authorities: Iterable[bytes], now: datetime.datetime | None = None
) -> str:
    """Check everything that needs no answer of the TPM, and return the authority's name.

    Raises `AttestationError` for another identity, an unsigned or changed request, a key that may leave its
    TPM or sign anything, and a certificate that is of no authority or for another key.
    """
    if request.member != member.name or request.identity_key != member.identity_key:
        raise AttestationError(f"the request is not of the {member.name} that the roster lists", hint=_AGAIN)
    try:
        verify(member.identity_key, request.signature, request.signed_bytes())
    except HandshakeError:
        raise AttestationError(
            f"the request is not signed by {member.name}'s identity key", hint=_AGAIN
        ) from None
    endorsement = parse_public(request.endorsement)
    check_endorsement_key(endorsement)
    check_attestation_key(parse_public(request.attestation))
    return check_endorsement(request.certificate, endorsement.key, authorities, now)


def challenge_for(request: Request) -> tuple[ActivationChallenge, PendingActivation]:
    """Return the member's challenge and the operator's own half. Call `check_request` before."""
    # The credential names the attestation key, so the TPM opens it only beside that very key.
    attestation = parse_public(request.attestation)
    secret = secrets.token_bytes(SECRET_BYTES)
    blobs = make_credential(parse_public(request.endorsement), attestation.name, secret)
    challenge = ActivationChallenge(request.member, key_algorithm(attestation.key_der), *blobs)
    return challenge, PendingActivation(request.member, request.identity_key, request.attestation, secret)


def answer_for(member: str, identity_key: bytes, attestation: bytes, secret: bytes) -> ActivationReply:
    """Return the member's answer, with the secret that its TPM gave out."""
    return ActivationReply(
        member, activation_proof(secret, member, identity_key, parse_public(attestation).name)
    )


def accept(answer: ActivationReply, pending: PendingActivation, member: Member) -> bytes:
    """Return the key (DER) to enrol for ``member``. Raises `AttestationError` for an invalid proof."""
    if not answer.member == pending.member == member.name or member.identity_key != pending.identity_key:
        raise AttestationError(
            f"the answer is not of the {pending.member} that was challenged",
            hint="give the answer to this member's last challenge, or make a new challenge",
        )
    public = parse_public(pending.attestation)
    # The proof covers the name and the identity key too, so it cannot serve for another member.
    check_proof(activation_proof(pending.secret, member.name, member.identity_key, public.name), answer.proof)
    return public.key_der


def request_to_text(request: Request) -> str:
    return _to_text(
        _REQUEST,
        "a request to enrol this machine's attestation key, for `convoy attest challenge`",
        request.member,
        identity_key=request.identity_key,
        certificate=request.certificate,
        endorsement=request.endorsement,
        attestation=request.attestation,
        signature=request.signature,
    )


def request_from_text(text: str) -> Request:
    """Return the request in a file. Raises `AttestationError`."""
    names = ("identity_key", "certificate", "endorsement", "attestation", "signature")
    member, fields = _from_text(text, _REQUEST, names)
    return Request(member, *(fields[name] for name in names))


def challenge_to_text(challenge: ActivationChallenge) -> str:
    return _to_text(
        _CHALLENGE,
        "a credential that only the member's TPM opens, for `convoy attest answer`",
        challenge.member,
        algorithm=challenge.algorithm.encode(),
        id_object=challenge.id_object,
        encrypted_secret=challenge.encrypted_secret,
    )


def challenge_from_text(text: str) -> ActivationChallenge:
    """Return the challenge in a file. Raises `AttestationError`."""
    member, fields = _from_text(text, _CHALLENGE, ("algorithm", "id_object", "encrypted_secret"))
    algorithm = fields["algorithm"].decode(errors="replace")
    return ActivationChallenge(member, algorithm, fields["id_object"], fields["encrypted_secret"])


def answer_to_text(answer: ActivationReply) -> str:
    return _to_text(_ANSWER, "for `convoy attest accept`", answer.member, proof=answer.proof)


def answer_from_text(text: str) -> ActivationReply:
    """Return the answer in a file. Raises `AttestationError`."""
    member, fields = _from_text(text, _ANSWER, ("proof",))
    return ActivationReply(member, fields["proof"])


def pending_to_text(pending: PendingActivation) -> str:
    return _to_text(
        _PENDING,
        "secret: what a member must prove",
        pending.member,
        identity_key=pending.identity_key,
        attestation=pending.attestation,
        secret=pending.secret,
    )


def pending_from_text(text: str) -> PendingActivation:
    """Return the operator's own half in a file. Raises `AttestationError`."""
    member, fields = _from_text(text, _PENDING, ("identity_key", "attestation", "secret"))
    return PendingActivation(member, fields["identity_key"], fields["attestation"], fields["secret"])


def _to_text(table: str, comment: str, member: str, **fields: bytes) -> str:
    lines = [f'{name} = "{base64.b64encode(value).decode()}"' for name, value in fields.items()]
    return "\n".join([f"# Convoy: {comment}.", f"[{table}]", f'member = "{member}"', *lines, ""])


def _from_text(text: str, table: str, names: Iterable[str]) -> tuple[str, dict[str, bytes]]:
    what = table.replace("_", " ")
    if len(text) > MAX_FILE_BYTES:
        raise AttestationError(f"the {what} has {len(text)} characters, and the limit is {MAX_FILE_BYTES}")
    try:
        tables = tomllib.loads(text)
    except (ValueError, RecursionError):
        raise AttestationError(f"the {what} is not TOML") from None
    fields = tables.get(table)
    # An unknown field may change the meaning in a later version, so it is refused.
    if set(tables) != {table} or not isinstance(fields, dict) or set(fields) != {"member", *names}:
        raise AttestationError(
            f"this is no {what}: its fields are others", hint=f"name the file of the {what}"
        )
    if not all(type(value) is str for value in fields.values()):
        raise AttestationError(f"a field of the {what} is no text")
    try:
        return fields["member"], {name: base64.b64decode(fields[name], validate=True) for name in names}
    except (ValueError, binascii.Error):
        raise AttestationError(f"a field of the {what} is not base64") from None
