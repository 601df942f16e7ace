"""The inner handshake, SIGMA-I over X25519 and ML-KEM-768, without any input or output of its own.

Source: H. Krawczyk, "SIGMA: the 'SIGn-and-MAc' approach to authenticated Diffie-Hellman", 2003, section
5.2; the hybrid of both key shares follows the TLS 1.3 hybrid design (both secrets concatenated, then
extracted). Bytes are in docs/protocol.md.

In the order the data moves: `Initiator.create_1` -> `Responder.consume_1`, `create_2` ->
`Initiator.consume_2`, `create_3` -> `Responder.consume_3`. A call out of order, or after a failure,
raises. Secrets exist only once the other side has proved itself.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from convoy.crypto import keys
from convoy.crypto.cipher import Cipher, choose_cipher
from convoy.crypto.claims import (
    LINK_ID_BYTES,
    NO_LINK,
    PROTOCOL_VERSION,
    HandshakeClaims,
    HandshakeContext,
    Party,
    check_claims,
    check_same_epoch,
    check_version,
    decode_offer,
    encode_claims,
)
from convoy.crypto.identity import verify
from convoy.errors import HandshakeError

__all__ = [
    "LINK_ID_BYTES",
    "NO_LINK",
    "PROTOCOL_VERSION",
    "HandshakeContext",
    "Ephemeral",
    "Initiator",
    "Party",
    "Responder",
    "Secrets",
]

_KEM_KEY_BYTES = 1184
_KEM_CIPHERTEXT_BYTES = 1088
_SHARES_1 = struct.Struct(f">32s{_KEM_KEY_BYTES}s")
_BODY_2 = struct.Struct(f">HBQ32s32s{_KEM_CIPHERTEXT_BYTES}s")
_PROOF = struct.Struct(">64s32s")

_INITIATOR = b"initiator"
_RESPONDER = b"responder"

Sign = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class Secrets:
    """Hold the results of a handshake at one end. They are never logged, shown or sent.

    ``binding`` (32 bytes) names this handshake to both ends alone. ``peer_epoch`` is the other end's
    roster epoch; where it differs from ours, one end lags. ``replaces``: see `HandshakeContext`.
    """

    cipher: Cipher
    send: bytearray = field(repr=False)
    receive: bytearray = field(repr=False)
    transcript: bytes = field(repr=False)
    binding: bytes = field(repr=False)
    peer_epoch: int
    replaces: bytes


@dataclass(frozen=True, slots=True)
class Ephemeral:
    """Hold the initiator's fresh keys. Test vectors give fixed ones."""

    x25519: X25519PrivateKey = field(default_factory=X25519PrivateKey.generate)
    mlkem: MLKEM768PrivateKey = field(default_factory=MLKEM768PrivateKey.generate)


class _End:
    """Hold the secrets of one end. Leaving its `with` block overwrites them, also after an error.

    A caller that needs the traffic secrets has copied them by then (`seal.make_sealing`).
    """

    def __init__(self) -> None:
        self._secret = bytearray()
        self._traffic = keys.TrafficSecrets(bytearray(), bytearray())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.wipe()

    def wipe(self) -> None:
        """Overwrite the secrets that this end derived. A failure inside a call does the same."""
        for secret in (self._secret, self._traffic.to_responder, self._traffic.to_initiator):
            keys.wipe(secret)


class Initiator(_End):
    """Run the dialling end."""

    def __init__(
        self,
        context: HandshakeContext,
        sign: Sign,
        ciphers: tuple[Cipher, ...],
        ephemeral: Ephemeral | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        self._sign = sign
        self._ciphers = ciphers
        self._ephemeral = ephemeral or Ephemeral()
        self._turn = _Turn(self.wipe, "create_1", "consume_2", "create_3")
        self._transcript = b""
        self._cipher = Cipher.CHACHA20_POLY1305
        self._peer_epoch = 0

    def create_1(self) -> bytes:
        """Return M1: both members' names, the link and roster, and the offered key shares and ciphers."""
        with self._turn("create_1"):
            shares = _SHARES_1.pack(
                self._ephemeral.x25519.public_key().public_bytes_raw(),
                self._ephemeral.mlkem.public_key().public_bytes_raw(),
            )
            message = encode_claims(self._context) + shares + bytes([len(self._ciphers), *self._ciphers])
            self._transcript = _first_transcript(self._context, message)
            return message

    def consume_2(self, message: bytes) -> None:
        """Check M2.

        Raises `Incompatible` for another version or roster, otherwise `HandshakeError` naming the fault.
        """
        with self._turn("consume_2"):
            check_version(self._context, self._context.responder.name, message)
            if len(message) != _BODY_2.size + _PROOF.size:
                raise HandshakeError(f"M2 has {len(message)} bytes, expected {_BODY_2.size + _PROOF.size}")
            body = message[: _BODY_2.size]
            _, cipher, epoch, digest, share, ciphertext = _BODY_2.unpack(body)
            check_same_epoch(self._context, self._context.responder.name, epoch, digest)
            # The responder may choose only from our offer, or it could force a weaker cipher.
            if cipher not in self._ciphers:
                raise HandshakeError(f"M2 chose cipher {cipher}, which was not offered")
            transcript = keys.transcript_2(self._transcript, body)
            # A wrong ciphertext does not fail here: it gives another secret, and then the MAC is wrong.
            self._secret = keys.extract(
                transcript,
                _x25519(self._ephemeral.x25519, share),
                self._ephemeral.mlkem.decapsulate(ciphertext),
            )
            proof = message[_BODY_2.size :]
            party = self._context.responder
            self._transcript = _check_proof(self._secret, _RESPONDER, transcript, party, proof)
            self._cipher, self._peer_epoch = Cipher(cipher), epoch

    def create_3(self) -> tuple[bytes, Secrets]:
        """Return M3 and the secrets. The responder has proved its identity already."""
        with self._turn("create_3"):
            party = self._context.initiator
            proof, transcript = _make_proof(self._secret, _INITIATOR, self._transcript, party, self._sign)
            self._traffic = traffic = keys.traffic_secrets(self._secret, transcript)
            binding = keys.link_binding(self._secret, transcript)
            # Only the traffic secrets are needed from here on.
            keys.wipe(self._secret)
            return proof, Secrets(
                self._cipher,
                traffic.to_responder,
                traffic.to_initiator,
                transcript,
                binding,
                self._peer_epoch,
                self._context.replaces,
            )


class Responder(_End):
    """Run the listening end. It knows the initiator's name from the pinned TLS certificate before M1
    arrives.
    """

    def __init__(
        self,
        context: HandshakeContext,
        sign: Sign,
        ciphers: tuple[Cipher, ...],
        ephemeral: X25519PrivateKey | None = None,
    ) -> None:
        super().__init__()
        self._context = context
        self._sign = sign
        self._ciphers = ciphers
        self._ephemeral = ephemeral or X25519PrivateKey.generate()
        self._turn = _Turn(self.wipe, "consume_1", "create_2", "consume_3")
        self._transcript = b""
        self._share = b""
        self._kem_key = b""
        self._cipher = Cipher.CHACHA20_POLY1305
        self._claims = HandshakeClaims(NO_LINK, 0)

    def consume_1(self, message: bytes) -> None:
        """Check M1 against the context of this end.

        Raises `Incompatible` (version, roster) or `HandshakeError`.
        """
        with self._turn("consume_1"):
            name = self._context.initiator.name
            # The version comes first: another version may lay out the rest in another way.
            check_version(self._context, name, message)
            self._claims, offset = check_claims(self._context, message)
            if len(message) < offset + _SHARES_1.size + 1:
                raise HandshakeError("M1 ends before its key shares")
            self._share, self._kem_key = _SHARES_1.unpack_from(message, offset)
            self._cipher = choose_cipher(decode_offer(message[offset + _SHARES_1.size :]), self._ciphers)
            self._transcript = _first_transcript(self._context, message)

    def create_2(self) -> bytes:
        """Return M2: this end's key share, the KEM ciphertext, the chosen cipher, and the proof of
        identity.
        """
        with self._turn("create_2"):
            mlkem_shared, ciphertext = _encapsulate(self._kem_key)
            share = self._ephemeral.public_key().public_bytes_raw()
            about = self._context
            body = _BODY_2.pack(
                about.version, self._cipher, about.roster_epoch, about.roster_digest, share, ciphertext
            )
            transcript = keys.transcript_2(self._transcript, body)
            self._secret = keys.extract(transcript, _x25519(self._ephemeral, self._share), mlkem_shared)
            party = self._context.responder
            proof, self._transcript = _make_proof(self._secret, _RESPONDER, transcript, party, self._sign)
            return body + proof

    def consume_3(self, message: bytes) -> Secrets:
        """Check M3 and return the secrets. Only M3 proves the initiator's identity. Raises
        `HandshakeError`.
        """
        with self._turn("consume_3"):
            party = self._context.initiator
            transcript = _check_proof(self._secret, _INITIATOR, self._transcript, party, message)
            self._traffic = traffic = keys.traffic_secrets(self._secret, transcript)
            binding = keys.link_binding(self._secret, transcript)
            keys.wipe(self._secret)
            # Mirrored: the responder sends with the secret that the initiator receives with.
            return Secrets(
                self._cipher,
                traffic.to_initiator,
                traffic.to_responder,
                transcript,
                binding,
                self._claims.epoch,
                self._claims.replaces,
            )


class _Turn:
    """Allow each call once and in order.

    A failure inside one ends the handshake for good, and calls ``failed``.
    """

    def __init__(self, failed: Callable[[], None], *calls: str) -> None:
        self._failed = failed
        self._left = list(calls)
        self._call = ""

    def __call__(self, call: str) -> _Turn:
        self._call = call
        return self

    def __enter__(self) -> None:
        # A repeated call could use the ephemeral keys twice, so it ends the handshake.
        if not self._left or self._left[0] != self._call:
            self._left.clear()
            self._failed()
            raise HandshakeError(f"{self._call} is out of order in this handshake")

    def __exit__(self, kind: object, *_rest: object) -> None:
        if kind is None:
            self._left.pop(0)
        else:
            self._left.clear()
            self._failed()


def _first_transcript(context: HandshakeContext, message: bytes) -> bytes:
    return keys.transcript_1(
        context.initiator.certificate_fingerprint, context.responder.certificate_fingerprint, message
    )


def _make_proof(
    secret: bytearray, role: bytes, transcript: bytes, party: Party, sign: Sign
) -> tuple[bytes, bytes]:
    signature = sign(keys.to_sign(role, transcript))
    mac = keys.proof_mac(secret, role, transcript, party.identity_key)
    return _PROOF.pack(signature, mac), keys.transcript_proof(transcript, signature, mac)


def _check_proof(secret: bytearray, role: bytes, transcript: bytes, party: Party, proof: bytes) -> bytes:
    if len(proof) != _PROOF.size:
        raise HandshakeError(f"a proof has {len(proof)} bytes, expected {_PROOF.size}")
    signature, mac = _PROOF.unpack(proof)
    # The MAC ties the signer's identity to this session's keys, which the signature alone does not (SIGMA).
    expected = keys.proof_mac(secret, role, transcript, party.identity_key)
    if not hmac.compare_digest(mac, expected):
        raise HandshakeError(f"the MAC of {party.name} is wrong")
    try:
        verify(party.identity_key, signature, keys.to_sign(role, transcript))
    except HandshakeError:
        raise HandshakeError(f"the signature is not by the identity key of {party.name}") from None
    return keys.transcript_proof(transcript, signature, mac)


def _x25519(key: X25519PrivateKey, share: bytes) -> bytes:
    try:
        # `exchange` refuses an all-zero result (RFC 7748, 6.1), so both ends contribute to the secret.
        return key.exchange(X25519PublicKey.from_public_bytes(share))
    except ValueError:
        raise HandshakeError("an X25519 share is of small order") from None


def _encapsulate(kem_key: bytes) -> tuple[bytes, bytes]:
    try:
        return MLKEM768PublicKey.from_public_bytes(kem_key).encapsulate()
    except ValueError:
        raise HandshakeError("an ML-KEM key is malformed") from None
