"""The claims of a handshake's first message about its ends, its link and their roster, and how they are
checked.

A claim that differs ends the handshake. The roster's epoch is the exception: if one end lags, the
handshake goes on, and the newer roster crosses the link that results.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from convoy.crypto.cipher import Cipher
from convoy.errors import HandshakeError, Incompatible

PROTOCOL_VERSION = 1
LINK_ID_BYTES = 16
NO_LINK = bytes(LINK_ID_BYTES)

_VERSION = struct.Struct(">H")


@dataclass(frozen=True, slots=True)
class Party:
    """Identify one end as the roster lists it: name, identity key (32 bytes), SHA-256 of its TLS
    certificate.
    """

    name: str
    identity_key: bytes
    certificate_fingerprint: bytes


@dataclass(frozen=True, slots=True)
class HandshakeContext:
    """Hold the facts that both ends know before the first message.

    They must agree, except on the roster's epoch.

    Only the initiator sets ``replaces``, the id of the standing link that this one is to replace.
    """

    initiator: Party
    responder: Party
    link_id: bytes
    cluster_id: str
    roster_epoch: int
    roster_digest: bytes
    version: int = PROTOCOL_VERSION
    replaces: bytes = NO_LINK


def claimed_version(message: bytes) -> int:
    """Return the version at the start of M1, M2 and END. It has the same place in every version.

    Raises `HandshakeError`.
    """
    if len(message) < _VERSION.size:
        raise HandshakeError(f"a handshake message has {len(message)} bytes, too few for a version")
    return int(_VERSION.unpack_from(message)[0])


def encode_claims(context: HandshakeContext) -> bytes:
    """Return the first fields of M1."""
    texts = (context.initiator.name, context.responder.name, context.cluster_id)
    encoded = [text.encode() for text in texts]
    named = b"".join(bytes([len(text)]) + text for text in encoded)
    roster = context.roster_epoch.to_bytes(8, "big") + context.roster_digest
    return _VERSION.pack(context.version) + context.link_id + context.replaces + named + roster


@dataclass(frozen=True, slots=True)
class HandshakeClaims:
    """Hold the two claims of M1 that the responder cannot know before."""

    replaces: bytes
    epoch: int


def check_claims(context: HandshakeContext, message: bytes) -> tuple[HandshakeClaims, int]:
    """Compare M1's claims with ours, and return the new ones and the offset at which they end.

    The roster is checked last, so that an error names a wrong member or cluster first.
    """
    reader = _Reader(message, _VERSION.size)
    if reader.take(LINK_ID_BYTES) != context.link_id:
        raise HandshakeError("M1 names another link than its connections")
    replaces = reader.take(LINK_ID_BYTES)
    for what, expected in (
        ("initiator", context.initiator.name),
        ("responder", context.responder.name),
        ("cluster", context.cluster_id),
    ):
        if reader.take(reader.take(1)[0]) != expected.encode():
            raise HandshakeError(f"M1 names another {what}, expected {expected}")
    epoch = int.from_bytes(reader.take(8), "big")
    digest = reader.take(32)
    check_same_epoch(context, context.initiator.name, epoch, digest)
    return HandshakeClaims(replaces, epoch), reader.offset


def check_roster(context: HandshakeContext, peer: str, epoch: int, digest: bytes) -> None:
    """Raise `Incompatible`, naming both rosters, unless both ends hold the same one.

    A link carries steps only between members with the same roster.
    """
    if epoch != context.roster_epoch:
        raise incompatible_epoch(peer, epoch, context.roster_epoch)
    check_same_epoch(context, peer, epoch, digest)


def incompatible_epoch(peer: str, theirs: int, ours: int) -> Incompatible:
    """Return the error for an end that lags and did not receive the newer roster."""
    return Incompatible(
        f"{peer} holds roster epoch {theirs}, and this member holds epoch {ours}",
        hint="give both members the newest roster file",
    )


def check_same_epoch(context: HandshakeContext, peer: str, epoch: int, digest: bytes) -> None:
    """Raise `Incompatible` for two rosters of one epoch, which are an operator's mistake.

    Different epochs pass: then one end lags, and the caller deals with it.
    """
    if epoch == context.roster_epoch and digest != context.roster_digest:
        raise Incompatible(
            f"{peer} holds another roster of the same epoch {epoch}: "
            f"digest {digest.hex()[:12]}, and this member's is {context.roster_digest.hex()[:12]}",
            hint="somebody signed two rosters with one epoch; make a new one with a higher epoch",
        )


class _Reader:
    def __init__(self, data: bytes, offset: int) -> None:
        self._data = data
        self.offset = offset

    def take(self, size: int) -> bytes:
        end = self.offset + size
        if end > len(self._data):
            raise HandshakeError(f"M1 ends at byte {len(self._data)}, inside a field that ends at {end}")
        part = self._data[self.offset : end]
        self.offset = end
        return part


def decode_offer(data: bytes) -> tuple[Cipher, ...]:
    """Return the ciphers at the end of M1, without unknown ones. Raises `HandshakeError`."""
    if len(data) != 1 + data[0]:
        raise HandshakeError(f"M1 offers {data[0]} ciphers in {len(data) - 1} bytes")
    return tuple(Cipher(number) for number in data[1:] if number in Cipher._value2member_map_)


def check_version(context: HandshakeContext, peer: str, message: bytes) -> None:
    """Raise `Incompatible`, naming both versions, if they differ.

    Raises `HandshakeError` for a message too short.
    """
    version = claimed_version(message)
    if version != context.version:
        raise incompatible_version(peer, version, context.version)


def incompatible_version(peer: str, theirs: int, ours: int) -> Incompatible:
    """Return the error that both ends raise, each naming both versions."""
    return Incompatible(
        f"{peer} speaks protocol version {theirs}, and this member speaks version {ours}",
        hint="install the same release of convoy on every member",
    )
