"""The evidence of a provider and its members: for its coordinator, and for proxies, which receive it
unchanged.

The provider signs the whole, so that no relay can leave a member out. Each member signs its own part, for
this provider's identity only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from convoy.crypto.identity import verify
from convoy.crypto.keys import prefixed
from convoy.errors import AttestationError, ConvoyError
from convoy.wire.fleet.messages import MAX_EVIDENCE_BYTES, Bytes32, Signature
from convoy.wire.messages.evidence import Evidence, Part, Register

MAX_MEMBERS = 64
MAX_ROSTER_BYTES = 256 * 1024
# One member's claims and parts together.
MAX_MEMBER_BYTES = 16 * 1024

_LABEL = b"convoy provider evidence v1"

MemberName = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")]


class MemberEvidence(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Hold one member's evidence as it came.

    The last four fields are those of `wire.messages.evidence.Evidence`.
    """

    name: MemberName
    identity: Bytes32
    claims: Annotated[bytes, msgspec.Meta(max_length=MAX_MEMBER_BYTES)]
    signature: Signature
    kind: Annotated[str, msgspec.Meta(max_length=32)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=32)]

    @property
    def evidence(self) -> Evidence:
        return Evidence(self.claims, self.signature, self.kind, self.parts)

    @property
    def num_bytes(self) -> int:
        return len(self.claims) + sum(map(len, self.parts))


class ProviderEvidence(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ProviderEvidence"
):
    """Hold the evidence for the challenge ``nonce`` of the coordinator with this key.

    The coordinator asked for ``registers`` of TPMs. ``roster`` is the file that its operator signed, or
    empty where there is none.
    """

    coordinator: Bytes32
    nonce: Bytes32
    registers: Annotated[list[Register], msgspec.Meta(max_length=24)]
    roster: Annotated[bytes, msgspec.Meta(max_length=MAX_ROSTER_BYTES)]
    members: Annotated[list[MemberEvidence], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]


class _Signed(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    said: Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE_BYTES)]
    signature: Signature


_signed = msgspec.msgpack.Decoder(_Signed)
_decoder = msgspec.msgpack.Decoder(ProviderEvidence)


def sign_provider_evidence(
    evidence: ProviderEvidence, request_key: bytes, expires_s: int, sign: Callable[[bytes], bytes]
) -> bytes:
    """Return the bytes to send. Raises `AttestationError` if they are more than a receiver takes."""
    said = msgspec.msgpack.encode(evidence)
    made = msgspec.msgpack.encode(_Signed(said, sign(_to_sign(request_key, expires_s, said))))
    if len(made) > MAX_EVIDENCE_BYTES:
        raise AttestationError(
            f"the evidence of {len(evidence.members)} members has {len(made)} bytes, and the limit is "
            f"{MAX_EVIDENCE_BYTES}"
        )
    return made


def read_provider_evidence(
    data: bytes, identity: bytes, request_key: bytes, expires_s: int
) -> ProviderEvidence:
    """Return the evidence that this provider signed for this request key. Nothing of the members is
    checked.

    Raises `AttestationError`, without quoting the bytes.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise AttestationError(
            f"a provider's evidence has {len(data)} bytes, and the limit is {MAX_EVIDENCE_BYTES}"
        )
    try:
        signed = _signed.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AttestationError(f"{len(data)} bytes of a provider are no evidence") from None
    try:
        verify(identity, signed.signature, _to_sign(request_key, expires_s, signed.said))
    except ConvoyError:
        raise AttestationError(
            "the evidence is not signed by this provider for its key for requests"
        ) from None
    try:
        found = _decoder.decode(signed.said)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise AttestationError(f"{len(data)} bytes that a provider signed are no evidence") from None
    for one in found.members:
        if one.num_bytes > MAX_MEMBER_BYTES:
            raise AttestationError(
                f"the evidence of {one.name} has {one.num_bytes} bytes, and the limit is {MAX_MEMBER_BYTES}"
            )
    return found


def _to_sign(request_key: bytes, expires_s: int, said: bytes) -> bytes:
    return prefixed(_LABEL, b"set", request_key, expires_s.to_bytes(8, "big"), said)
