"""The newcomer's end of an invitation: find the listener, prove the own keys, and return the roster."""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from convoy.cluster.enrolment.inviter import PENDING
from convoy.crypto.enrolment import (
    HASH_BYTES,
    NONCE_BYTES,
    Terms,
    check_listener_mac,
    code,
    commit,
    hello_mac,
    make_proof,
    transcript,
)
from convoy.crypto.identity import Identity
from convoy.errors import FrameError, HandshakeError, InviteError, LinkBroken, PeerUnreachable, RosterError
from convoy.transport.listen.enrolment_tls import dial_pinned, receive_enrolment, send_enrolment
from convoy.transport.streams.stream import Stream
from convoy.trust.invite import Token
from convoy.trust.roster.roster import Member, SignedRoster, check_member, format_address, open_roster
from convoy.wire.messages.enrolment import (
    EnrolmentCard,
    EnrolmentType,
    Refusal,
    decode_refusal,
    encode_card,
    encode_proof,
)

DIAL_TIMEOUT_S = 5.0
PROOF_TIMEOUT_S = 10.0
DECISION_TIMEOUT_S = 330.0

_AGAIN = "ask for a new one: `convoy invite` on the inviting machine"
_REFUSALS: dict[Refusal, tuple[str, str | None]] = {
    Refusal.EXPIRED: ("the invitation has expired there", _AGAIN),
    Refusal.CONSUMED: ("the invitation is used up: another machine came first", _AGAIN),
    Refusal.BUSY: (
        "the invitation was closed after too many connections without a right proof",
        _AGAIN,
    ),
    Refusal.FAILED: ("the inviting machine refused the proof", "copy the whole invitation once more"),
    Refusal.BAD_CARD: (
        "no roster can hold what this machine says about itself",
        "is the address given by --address right, and the identity one of its own?",
    ),
    Refusal.DECLINED: ("the operator said no", "compare the codes on both screens, and " + _AGAIN),
    Refusal.ENDED: ("the inviting machine gave up", _AGAIN),
}


class NameTaken(InviteError):  # noqa: N818 - a state, as in errors.py
    """Say that another member has the name. The invitation is still good."""


@dataclass(frozen=True, slots=True)
class EnrolmentRequest:
    """Describe the newcomer's wishes. ``host`` None: its own address on the way to the inviting machine."""

    name: str
    host: str | None
    port: int


@dataclass(frozen=True, slots=True)
class Enrolled:
    """Hold the roster, verified under the token's operator key, and this machine's entry in it."""

    signed: SignedRoster
    member: Member


def join_by_token(
    token: Token,
    identity: Identity,
    asked: EnrolmentRequest,
    on_code: Callable[[str], None],
    *,
    dial_timeout_s: float = DIAL_TIMEOUT_S,
) -> Enrolled:
    """Use an invitation, and return the roster that lists this machine.

    ``on_code`` gets the digits to compare, as soon as the inviter has proved that it holds the secret.

    Raises `InviteError` (expired, used up, declined), `NameTaken`, `PeerUnreachable` with every address
    that was tried, `HandshakeError` for a listener that is not the invitation's, or `RosterError` if the
    roster that came is not the promised one.
    """
    token.require_usable(datetime.datetime.now(datetime.UTC))
    stream, local = _dial(token, dial_timeout_s)
    try:
        stream.set_deadline(time.monotonic() + PROOF_TIMEOUT_S)
        card = EnrolmentCard(
            asked.name, (asked.host or local, asked.port), identity.public_key, identity.tls_certificate_der
        )
        check_member(Member(card.name, card.identity_key, card.certificate_der, card.address))
        return _enrol(stream, token, identity, card, on_code)
    finally:
        stream.close()


def _enrol(
    stream: Stream, token: Token, identity: Identity, card: EnrolmentCard, on_code: Callable[[str], None]
) -> Enrolled:
    nonce, card_bytes = os.urandom(NONCE_BYTES), encode_card(card)
    terms = Terms(token.secret, token.invitation, token.fingerprint)
    commitment = commit(nonce, card_bytes)
    challenge = _hello(stream, card, commitment + hello_mac(terms, commitment))
    spoken = transcript(terms, commitment, challenge, nonce, card_bytes)
    proof = make_proof(terms, identity, nonce, spoken)
    send_enrolment(stream, EnrolmentType.PROOF, encode_proof(proof, card_bytes))
    check_listener_mac(token.secret, spoken, PENDING, _expect(stream, EnrolmentType.PENDING, card))
    on_code(code(token.secret, spoken))
    stream.set_deadline(time.monotonic() + DECISION_TIMEOUT_S)
    try:
        body = _expect(stream, EnrolmentType.ACCEPTED, card)
    except LinkBroken as error:
        raise InviteError(
            "the invitation is used up, and the inviting machine went away before it let this one in",
            hint=_AGAIN,
        ) from error
    check_listener_mac(token.secret, spoken, body[HASH_BYTES:], body[:HASH_BYTES])
    return _verified(body[HASH_BYTES:], token, card)


def _hello(stream: Stream, card: EnrolmentCard, hello: bytes) -> bytes:
    """Return the challenge. An inviter that does not take the HELLO hangs up without a word."""
    try:
        send_enrolment(stream, EnrolmentType.HELLO, hello)
        return _expect(stream, EnrolmentType.CHALLENGE, card)
    except LinkBroken as error:
        raise LinkBroken(
            f"the inviting machine did not answer: {error.message}",
            hint="are both machines on the same version of convoy, and is the invitation whole?",
        ) from error


def _verified(roster: bytes, token: Token, card: EnrolmentCard) -> Enrolled:
    signed = open_roster(roster, operator_key=token.operator_key, cluster_id=token.cluster_id)
    member = signed.roster.member_with_certificate(card.certificate_der)
    if member is None or member.identity_key != card.identity_key:
        raise RosterError(
            "the roster that came does not list this machine", hint="ask the operator for a new invitation"
        )
    return Enrolled(signed, member)


def _expect(stream: Stream, kind: EnrolmentType, card: EnrolmentCard) -> bytes:
    came, body = receive_enrolment(stream)
    if came is EnrolmentType.REFUSED:
        reason = decode_refusal(body)
        if reason is Refusal.NAME_TAKEN:
            raise NameTaken(
                f"the cluster has a member {card.name} already, with another identity",
                hint="run this command again with --name OTHER: the invitation is still good",
            )
        if reason is Refusal.ADDRESS_TAKEN:
            raise InviteError(
                f"another member of the cluster has the address {format_address(card.address)}",
                hint="run this command again with --port PORT, or with --address HOST:PORT: the invitation "
                "is still good",
            )
        text, hint = _REFUSALS[reason]
        raise InviteError(text, hint=hint)
    if came is not kind:
        raise FrameError(f"the inviting machine sent a {came.name}, expected a {kind.name}")
    return body


def _dial(token: Token, timeout_s: float) -> tuple[Stream, str]:
    """Return a stream to the first address at which the listener with the token's certificate answers."""
    failed: list[str] = []
    wrong: HandshakeError | None = None
    for address in token.addresses:
        try:
            return dial_pinned(address, token.fingerprint, time.monotonic() + timeout_s)
        except PeerUnreachable as error:
            failed.append(f"{format_address(address)} ({error.message})")
        except HandshakeError as error:
            failed.append(f"{format_address(address)} ({error.message})")
            wrong = error
    if wrong is not None:
        raise HandshakeError(
            f"the inviting machine was not found: {', '.join(failed)}",
            hint="an older invitation, another service, or an attacker in between: it was told nothing",
        ) from wrong
    raise PeerUnreachable(
        f"the inviting machine could not be reached: {', '.join(failed)}",
        hint="is `convoy invite` still running there, and its port open in the firewall? "
        "`convoy invite --address HOST:PORT` names another address",
    )
