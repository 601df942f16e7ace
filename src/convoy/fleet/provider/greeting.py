"""Exchange a provider's first messages with a coordinator, and verify it before anything else is sent."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass

import msgspec
from websockets.asyncio.client import ClientConnection

from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.identity import verify
from convoy.errors import ConvoyError, FrameError, PeerRefused, ProviderError
from convoy.wire.fleet.messages import (
    MAX_GREETING_BYTES,
    PROTOCOL,
    ProviderChallenge,
    ProviderHello,
    Refused,
    challenge_bytes,
    decode_from_coordinator,
    encode_fleet,
)


class CoordinatorUnproved(PeerRefused):
    """Signal that the other end fails to prove that it is the pinned coordinator.

    The proof covers the coordinator's key, this address and the TLS certificate.
    """


class NotYet(ProviderError):  # noqa: N818
    """Signal that the coordinator was reached and refuses; it may accept later."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """Verify one coordinator.

    ``authority`` is host:port as dialled. ``pinned`` is the one key that a coordinator may have, or None.
    """

    authority: str
    pinned: bytes | None

    async def challenged(self, connection: ClientConnection) -> ProviderChallenge:
        """Return the coordinator's challenge with its key in it, both proved.

        Raises `CoordinatorUnproved`, `NotYet` and `FrameError`.
        """
        seen = _certificate_hash(connection)
        hello = ProviderHello(
            PROTOCOL, secrets.token_bytes(32), self.authority, bool(seen), self.pinned is not None
        )
        await connection.send(encode_fleet(hello))
        answer = decode_from_coordinator(binary(await connection.recv()), MAX_GREETING_BYTES)
        if isinstance(answer, Refused):
            # The refusal is not signed, so anybody on the way may have sent it. It must never be final.
            raise NotYet(f"the coordinator says: {answer.reason}")
        if not isinstance(answer, ProviderChallenge) or answer.protocol != PROTOCOL:
            raise ProviderError(
                f"the coordinator does not speak version {PROTOCOL} of this protocol",
                hint="run the same version of convoy at the coordinator and here",
            )
        return self._checked(hello, answer, seen)

    def _checked(self, hello: ProviderHello, challenge: ProviderChallenge, seen: bytes) -> ProviderChallenge:
        key = challenge.coordinator if self.pinned is None else self.pinned
        try:
            verify(key, challenge.signature, challenge_bytes(hello, challenge))
        except ConvoyError:
            raise CoordinatorUnproved(
                f"the challenge is not signed by the coordinator with the expected key {key.hex()}",
                hint="compare --coordinator-key with what `convoy coordinator` shows",
            ) from None
        if self.pinned is not None and challenge.certificate != seen:
            raise _other_certificate(challenge.certificate, seen)
        return msgspec.structs.replace(challenge, coordinator=key)


async def after_approval(connection: ClientConnection, wait_s: float, draining: asyncio.Event) -> bytes:
    """Return the message that ends a wait for approval. Raises TimeoutError, also if this provider drains."""
    hearing = asyncio.ensure_future(connection.recv())
    leaving = asyncio.ensure_future(draining.wait())
    try:
        await asyncio.wait({hearing, leaving}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not hearing.done():
            raise TimeoutError
        return binary(hearing.result())
    finally:
        hearing.cancel()
        leaving.cancel()


def _other_certificate(signed: bytes, seen: bytes) -> CoordinatorUnproved:
    if not signed:
        return CoordinatorUnproved(
            "the coordinator does not know the TLS certificate of this connection, so it may be relayed",
            hint="where a TLS proxy stands in front: convoy coordinator --public-certificate FILE",
        )
    return CoordinatorUnproved(
        f"the coordinator signed the certificate {signed.hex()[:16]}..., and this connection has "
        f"{seen.hex()[:16] or 'none'}: it is relayed",
        hint="where a TLS proxy stands in front: convoy coordinator --public-certificate FILE",
    )


def _certificate_hash(connection: ClientConnection) -> bytes:
    """Return the SHA-256 of the other end's TLS certificate; empty without TLS."""
    tls = connection.transport.get_extra_info("ssl_object")
    if tls is None:
        return b""
    certificate = tls.getpeercert(binary_form=True)
    assert certificate is not None, "a verified connection has one"
    return certificate_fingerprint(certificate)


def binary(data: str | bytes) -> bytes:
    """Return a message's bytes. Raises `FrameError` for text."""
    if isinstance(data, str):
        raise FrameError("the coordinator sends text")
    return data
