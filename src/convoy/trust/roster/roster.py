"""Make and sign the list of members: readable TOML, and the operator's Ed25519 signature at its end.

In order: `make_roster` -> `sign_roster` -> a file -> `open_roster` at every member. The signature covers the
exact bytes in front of the `[signature]` table, behind a label, so no signature can be moved to another kind
of text.
"""

from __future__ import annotations

import base64
import binascii
import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from convoy.crypto.identity import OperatorKey, verify
from convoy.crypto.keys import prefixed
from convoy.errors import HandshakeError, RosterError
from convoy.transport.member import Member, Roster
from convoy.trust.roster.check import check_member, check_roster
from convoy.trust.roster.operator import (
    MAX_HANDOVERS,
    Handover,
    check_path,
    handover_to_toml,
    handovers_from,
    walk,
)
from convoy.trust.roster.text import (
    COPY_HINT,
    check_keys,
    format_address,
    format_body,
    get,
    member_from_table,
    member_to_toml,
    parse_address,
    parse_body,
    parse_toml,
)
from convoy.wire.messages.control import MAX_ROSTER_BYTES

__all__ = [
    "MAX_ROSTER_BYTES",
    "Member",
    "Roster",
    "SignedRoster",
    "check_member",
    "format_address",
    "make_roster",
    "member_from_table",
    "member_to_toml",
    "open_roster",
    "parse_address",
    "sign_roster",
]

_MAX_TAIL_BYTES = 16 * 1024
DEFAULT_LIFETIME = datetime.timedelta(days=30)

_LABEL = b"convoy signed roster v1\0"
_LABEL_HANDED_OVER = b"convoy signed roster with handovers v1"
_SEPARATOR = b"\n[signature]\n"


@dataclass(frozen=True, slots=True)
class SignedRoster:
    """Hold a roster after its signature was checked, and the file that it came from.

    ``operator`` signed it, with ``handovers``; those from the trusted key to ``operator`` were checked.
    """

    roster: Roster
    digest: bytes
    raw: bytes = field(repr=False)
    operator: bytes
    handovers: tuple[Handover, ...] = ()


def make_roster(
    cluster_id: str,
    members: Iterable[Member],
    *,
    epoch: int = 1,
    not_before: datetime.datetime | None = None,
    lifetime: datetime.timedelta = DEFAULT_LIFETIME,
) -> Roster:
    """Return a roster that is valid from ``not_before`` (now) for ``lifetime``.

    Raises `RosterError` for invalid facts.
    """
    start = (not_before or datetime.datetime.now(datetime.UTC)).astimezone(datetime.UTC)
    # The file has whole seconds.
    start = start.replace(microsecond=0)
    try:
        end = start + lifetime
    except OverflowError:
        raise RosterError(
            f"the roster would expire after the year {datetime.MAXYEAR}", hint="give it fewer days"
        ) from None
    roster = Roster(cluster_id, epoch, start, end, tuple(members))
    check_roster(roster)
    return roster


def sign_roster(roster: Roster, operator: OperatorKey, handovers: Sequence[Handover] = ()) -> bytes:
    """Return the file to hand to every member, with the handovers that led to ``operator``.

    Raises `RosterError` for invalid facts.
    """
    check_roster(roster)
    if len(handovers) > MAX_HANDOVERS:
        raise RosterError(
            f"{len(handovers)} handovers led to this operator, and no member reads more than {MAX_HANDOVERS}"
        )
    body = format_body(roster)
    signature = operator.sign(_signed_bytes(body, handovers))
    return body + _SEPARATOR + _Signature(operator.public_key, signature, tuple(handovers)).tail()


def open_roster(
    data: bytes,
    *,
    operator_key: bytes,
    now: datetime.datetime | None = None,
    cluster_id: str | None = None,
) -> SignedRoster:
    """Check and read a roster file; nothing in it is looked at before the signature holds.

    ``operator_key`` is the trusted one; the signer's may be another that handovers lead to from there. Raises
    `RosterError`: too long, unsigned, signed by another key, changed, malformed, of another cluster (if
    ``cluster_id`` is given), not valid yet, or expired.
    """
    signed = verify_roster(data, operator_key=operator_key)
    if cluster_id is not None and signed.roster.cluster_id != cluster_id:
        raise RosterError(
            f"the roster is for cluster {signed.roster.cluster_id}, expected {cluster_id}",
            hint="copy the roster of this member's own cluster",
        )
    signed.roster.require_valid(now or datetime.datetime.now(datetime.UTC))
    return signed


def verify_roster(data: bytes, *, operator_key: bytes) -> SignedRoster:
    """Check and read a roster as `open_roster`, whatever the time: to look at it, never to trust it.

    Raises `RosterError`.
    """
    body, signature = _split(data)
    # The body is parsed only after both the path to the signer and the signature hold.
    path = walk(operator_key, signature.operator, signature.handovers)
    try:
        verify(signature.operator, signature.ed25519, _signed_bytes(body, signature.handovers))
    except HandshakeError:
        raise RosterError(
            "the roster was changed after it was signed", hint="fetch it again, or sign it again"
        ) from None
    roster = parse_body(body)
    # The cluster and the epoch are in the body, so this check can come only now.
    check_path(path, roster.cluster_id, roster.epoch)
    return SignedRoster(roster, roster.digest, data, signature.operator, signature.handovers)


def _signed_bytes(body: bytes, handovers: Sequence[Handover]) -> bytes:
    """Return the bytes that the signature covers, with the handovers.

    Any member that passes a roster on could otherwise strip or pad them, and the next member would keep them
    and pass them on in turn.
    """
    if not handovers:
        return _LABEL + body
    return prefixed(_LABEL_HANDED_OVER, body, *(handover.encode() for handover in handovers))


@dataclass(frozen=True, slots=True)
class _Signature:
    """Hold the part behind the body; nothing of it is verified yet."""

    operator: bytes
    ed25519: bytes
    handovers: tuple[Handover, ...]

    def tail(self) -> bytes:
        """Return the part as it stands in the file."""
        lines = f'operator = "{self.operator.hex()}"\ned25519 = "{base64.b64encode(self.ed25519).decode()}"\n'
        return (lines + "".join(map(handover_to_toml, self.handovers))).encode()


def _split(data: bytes) -> tuple[bytes, _Signature]:
    if len(data) > MAX_ROSTER_BYTES:
        raise RosterError(
            f"the roster has {len(data)} bytes, and the limit is {MAX_ROSTER_BYTES}", hint=COPY_HINT
        )
    body, separator, tail = data.rpartition(_SEPARATOR)
    if not separator:
        raise RosterError("the roster is unsigned", hint="sign it: `convoy roster new`")
    if len(tail) > _MAX_TAIL_BYTES:
        raise RosterError(
            f"the roster's signature has {len(tail)} bytes, and the limit is {_MAX_TAIL_BYTES}",
            hint=COPY_HINT,
        )
    file = parse_toml(_SEPARATOR + tail)
    check_keys(file, frozenset({"signature"}), "the end of the roster")
    table = get(file, "signature", dict)
    check_keys(table, frozenset({"operator", "ed25519"}), "the signature", frozenset({"handovers"}))
    try:
        signature = base64.b64decode(get(table, "ed25519", str), validate=True)
    except (ValueError, binascii.Error):
        raise RosterError("the roster's signature is not base64", hint=COPY_HINT) from None
    try:
        operator = bytes.fromhex(get(table, "operator", str))
    except ValueError:
        raise RosterError("the operator's key in the roster is not hex", hint=COPY_HINT) from None
    found = _Signature(operator, signature, handovers_from(table.get("handovers", [])))
    # Base64 and hex have several spellings, but one roster is one file.
    if found.tail() != tail:
        raise RosterError(
            "the roster's signature is spelled otherwise than Convoy writes it",
            hint="fetch it again, or sign it again",
        )
    return body, found
