"""Frames of enrolment: a protocol of its own between an invitation's listener and a newcomer.

Magic and types differ from those of links, so that neither can be fed to the other. Layout:
docs/protocol.md, "Enrolment".
"""

from __future__ import annotations

import enum
import itertools
import struct
from dataclasses import dataclass, field

from convoy.crypto.enrolment import HASH_BYTES, NONCE_BYTES, SIGNATURE_BYTES, EnrolmentProof
from convoy.crypto.keys import prefixed
from convoy.errors import FrameError, FrameTooLong, Incompatible
from convoy.wire.messages.control import MAX_ROSTER_BYTES

MAGIC = b"CNVE"
VERSION = 2
PREAMBLE_BYTES = 12

_PREAMBLE = struct.Struct(">4sHBBI")
_PROOF_BYTES = NONCE_BYTES + 2 * SIGNATURE_BYTES + HASH_BYTES


class EnrolmentType(enum.IntEnum):
    """Number the frames of enrolment. Types 1 and 3 come from the newcomer, the others from the inviter."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    PENDING = 4
    ACCEPTED = 5
    REFUSED = 6


class Refusal(enum.IntEnum):
    """Name the inviter's reason for refusing.

    FAILED covers every proof that does not hold, whatever its fault.
    """

    EXPIRED = 1
    CONSUMED = 2
    BUSY = 3
    FAILED = 4
    NAME_TAKEN = 5
    BAD_CARD = 6
    DECLINED = 7
    ENDED = 8
    ADDRESS_TAKEN = 9


# The bytes that a stranger can make a listener read add up to less than 4 KiB.
MAX_BODY_BYTES: dict[EnrolmentType, int] = {
    EnrolmentType.HELLO: 2 * HASH_BYTES,
    EnrolmentType.CHALLENGE: NONCE_BYTES,
    EnrolmentType.PROOF: 3072,
    EnrolmentType.PENDING: HASH_BYTES,
    EnrolmentType.ACCEPTED: HASH_BYTES + MAX_ROSTER_BYTES,
    EnrolmentType.REFUSED: 1,
}
_MIN_BODY_BYTES = {**MAX_BODY_BYTES, EnrolmentType.PROOF: _PROOF_BYTES, EnrolmentType.ACCEPTED: HASH_BYTES}
_TYPES = {int(kind): kind for kind in EnrolmentType}


@dataclass(frozen=True, slots=True)
class EnrolmentCard:
    """Hold the entry that a newcomer asks the roster to list. ``address`` is (host, port)."""

    name: str
    address: tuple[str, int]
    identity_key: bytes
    certificate_der: bytes = field(repr=False)


def encode_enrolment(kind: EnrolmentType, body: bytes) -> bytes:
    """Return a whole frame. Raises `FrameError` for a body that no receiver would take."""
    _check_length(kind, len(body))
    return _PREAMBLE.pack(MAGIC, VERSION, kind, 0, len(body)) + body


def decode_enrolment_preamble(data: bytes | bytearray) -> tuple[EnrolmentType, int]:
    """Return type and body length. Raises `Incompatible` for another version, otherwise `FrameError`."""
    if len(data) != PREAMBLE_BYTES or bytes(data[:4]) != MAGIC:
        raise FrameError("the other end does not speak enrolment: no frame of it came")
    _, version, number, zero, length = _PREAMBLE.unpack(data)
    if version != VERSION:
        raise Incompatible(
            f"the other end speaks version {version} of enrolment, and this one {VERSION}",
            hint="install the same version of convoy on both machines",
        )
    kind = _TYPES.get(number)
    if kind is None or zero != 0:
        raise FrameError(f"0x{number:02x} is not the type of a frame of enrolment")
    _check_length(kind, length)
    return kind, length


def encode_proof(proof: EnrolmentProof, card: bytes) -> bytes:
    """Return the body of a PROOF."""
    return proof.nonce + proof.identity_signature + proof.tls_signature + proof.mac + card


def decode_proof(body: bytes) -> tuple[EnrolmentProof, bytes]:
    """Return the proof and the card's bytes from a body of checked length."""
    cuts = (0, NONCE_BYTES, NONCE_BYTES + SIGNATURE_BYTES, NONCE_BYTES + 2 * SIGNATURE_BYTES, _PROOF_BYTES)
    parts = [bytes(body[start:end]) for start, end in itertools.pairwise(cuts)]
    return EnrolmentProof(*parts), bytes(body[_PROOF_BYTES:])


def encode_card(card: EnrolmentCard) -> bytes:
    """Return five parts, each behind its length: name, host, port, identity key, certificate."""
    host, port = card.address
    return prefixed(
        card.name.encode(), host.encode(), port.to_bytes(2, "big"), card.identity_key, card.certificate_der
    )


def decode_card(data: bytes) -> EnrolmentCard:
    """Return the card. Raises `FrameError` for bytes that `encode_card` never gives.

    `trust` judges the values.
    """
    parts: list[bytes] = []
    rest = data
    while rest and len(parts) < 5:
        end = 4 + int.from_bytes(rest[:4], "big")
        if len(rest) < 4 or len(rest) < end:
            raise FrameError(f"a card of {len(data)} bytes is cut off")
        parts.append(rest[4:end])
        rest = rest[end:]
    if rest or len(parts) != 5 or len(parts[2]) != 2 or len(parts[3]) != 32:
        raise FrameError(f"a card of {len(data)} bytes does not have the parts of one")
    try:
        name, host = parts[0].decode(), parts[1].decode()
    except UnicodeDecodeError:
        raise FrameError("a card's name or host is not UTF-8") from None
    return EnrolmentCard(name, (host, int.from_bytes(parts[2], "big")), parts[3], parts[4])


def decode_refusal(body: bytes) -> Refusal:
    """Return the reason of a refusal. Raises `FrameError` for a reason that this version does not know."""
    try:
        return Refusal(body[0])
    except ValueError:
        raise FrameError(f"the inviting machine refused for the unknown reason {body[0]}") from None


def _check_length(kind: EnrolmentType, length: int) -> None:
    limit, least = MAX_BODY_BYTES[kind], _MIN_BODY_BYTES[kind]
    if length > limit:
        raise FrameTooLong(f"a {kind.name} claims {length} bytes, and its limit is {limit}")
    if length < least:
        raise FrameError(f"a {kind.name} claims {length} bytes, expected {least} or more")
