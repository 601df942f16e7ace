"""The messages between a provider and a coordinator: binary WebSocket messages, a closed set.

The provider dials and says hello, the coordinator challenges, the provider registers. From then on
requests go one way and answers the other, each sealed between the client that asked and the provider.
Bytes of either side are hostile until it has proved its identity, and suspect afterwards: every length is
bounded here.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from convoy.crypto.keys import prefixed
from convoy.errors import FrameError, FrameTooLong
from convoy.wire.messages.evidence import Register as TpmRegister
from convoy.wire.text import plain_text

PROTOCOL = 2
# The limit before the other side has proved its identity.
MAX_GREETING_BYTES = 4 * 1024
MAX_REGISTRATION_BYTES = 1024 * 1024
# Evidence of a provider's members; see `wire.fleet.provider_evidence`.
MAX_EVIDENCE_BYTES = 768 * 1024
# A sealed request and the fields beside it.
MAX_MESSAGE_BYTES = 16 * 1024 * 1024 + 64 * 1024
MAX_CHUNK_MESSAGE_BYTES = 2 * 1024 * 1024 + 64 * 1024

_CHALLENGE_LABEL = b"convoy coordinator challenge v1"
_LABEL = b"convoy provider registration v1"
_PROOF_LABEL = b"convoy provider proof v1"
_KEY_LABEL = b"convoy provider request key v1"

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
PublicKey = Annotated[bytes, msgspec.Meta(min_length=1216, max_length=1216)]
KeyId = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
RequestId = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
Prose = Annotated[str, msgspec.Meta(max_length=1000)]
EvidenceBytes = Annotated[bytes, msgspec.Meta(max_length=MAX_EVIDENCE_BYTES)]
# The kinds of requests. `fleet.apis.table` has a row for each.
Kind = Literal["chat", "completion", "messages", "responses", "count_tokens", "tokenize", "detokenize"]
TpmRegisters = Annotated[list[TpmRegister], msgspec.Meta(max_length=24)]


class FleetMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag_field="t"):
    """Serve as the base of all fleet messages: a msgpack array of the kind's tag and the fields in order.

    The tags are bytes on the wire, so each class names its own: a class may be renamed, its tag never.
    """


class ProviderHello(FleetMessage, frozen=True, tag="Hello"):
    """Ask the coordinator at this address to prove that it is the one (provider to coordinator, first of
    all).

    ``authority`` is host:port as dialled. ``tls``: the provider's connection is TLS. ``pinned``: the
    provider knows the coordinator's key, so the challenge need not hold it.
    """

    protocol: int
    nonce: Bytes32
    authority: Annotated[str, msgspec.Meta(min_length=1, max_length=300)]
    tls: bool
    pinned: bool


class ProviderChallenge(FleetMessage, frozen=True, tag="Challenge"):
    """Ask the provider to prove its identity, now and to this coordinator (coordinator to provider).

    ``coordinator`` is its Ed25519 key, or empty for a provider that knows it. ``certificate`` is the
    SHA-256 of the TLS certificate that providers see, or empty. ``signature`` is by that key, over
    `challenge_bytes`.
    """

    protocol: int
    coordinator: Annotated[bytes, msgspec.Meta(max_length=32)]
    nonce: Bytes32
    certificate: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    signature: Signature = bytes(64)
    # The TPM registers that the evidence must cover.
    registers: TpmRegisters = []


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Offer a model, and state how fast the provider serves it.

    `fleet.capacity.Capacity` explains the fields.
    """

    model: Name
    slots: int
    decode_rate: float
    batch_rate: float
    prefill_rate: float
    max_context: int
    template_tokens: int = 0


class Register(FleetMessage, frozen=True, tag="Register"):
    """Register a provider (provider to coordinator).

    ``signature`` is by its identity, over `registration_bytes`.

    Proxies believe no coordinator, so the coordinator passes three fields on to them unchanged:
    ``key_signature``, over `request_key_bytes`; ``certificate``, of `wire.fleet.certified`, or empty; and
    ``evidence``, of `wire.fleet.provider_evidence`, or empty.
    """

    identity: Bytes32
    # Requests are sealed to this key.
    request_key: PublicKey
    # Unix time.
    request_key_expires_s: Count
    key_signature: Signature
    certificate: Annotated[bytes, msgspec.Meta(max_length=1024)]
    software: Annotated[str, msgspec.Meta(max_length=100)]
    offers: Annotated[list[Offer], msgspec.Meta(min_length=1, max_length=64)]
    signature: Signature
    evidence: EvidenceBytes = b""


class Registered(FleetMessage, frozen=True, tag="Registered"):
    """Confirm a registration: requests may come, under this name (coordinator to provider)."""

    name: Name
    # The number of chunks of an answer that may be under way.
    window: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class AwaitApproval(FleetMessage, frozen=True, tag="AwaitApproval"):
    """Tell a provider that its key is not approved yet (coordinator to provider).

    It should stay connected: `Registered` or `Refused` follows within ``wait_s``.
    """

    wait_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]


class Refused(FleetMessage, frozen=True, tag="Refused"):
    """Refuse a provider and say why; the socket ends (coordinator to provider).

    ``again``: another try may succeed.

    ``unapproved``: the provider's key is not approved yet.
    """

    reason: Prose
    again: bool
    unapproved: bool = False


class Prove(FleetMessage, frozen=True, tag="Prove"):
    """Ask a registered provider now and then to prove its identity again (coordinator to provider)."""

    nonce: Bytes32
    registers: TpmRegisters = []


class Proof(FleetMessage, frozen=True, tag="Proof"):
    """Answer `Prove`: the identity's signature over `proof_bytes`, and evidence for that nonce, or none."""

    nonce: Bytes32
    signature: Signature
    evidence: EvidenceBytes = b""


class ModelLoad(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Report the load of one model in a heartbeat. `fleet.capacity.Load` explains the fields."""

    model: Name
    free_slots: int
    queued_tokens: int
    free_memory_bytes: int
    decode_rate: float
    streams: float = 1.0


class Heartbeat(FleetMessage, frozen=True, tag="Heartbeat"):
    """Report the load of each model every few seconds (provider to coordinator)."""

    loads: Annotated[list[ModelLoad], msgspec.Meta(max_length=64)]


class DrainNotice(FleetMessage, frozen=True, tag="Draining"):
    """Announce that the provider finishes its running requests and takes no new ones (provider to
    coordinator).
    """


class Serve(FleetMessage, frozen=True, tag="Serve"):
    """Ask a provider to answer a request (coordinator to provider). The body's seal covers the other
    fields.

    Only ``trace`` is outside the seal: a traceparent of W3C Trace Context, which holds random ids, or
    nothing.
    """

    request_id: RequestId
    key_id: KeyId
    model: Name
    lease: Annotated[bytes, msgspec.Meta(max_length=64)]
    expires_s: Count
    max_tokens: Count
    kind: Kind
    sealed: Annotated[bytes, msgspec.Meta(max_length=16 * 1024 * 1024)]
    trace: Annotated[str, msgspec.Meta(pattern=r"^(00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z")] = ""


class Cancel(FleetMessage, frozen=True, tag="Cancel"):
    """Cancel a request: its answer is no longer wanted (coordinator to provider)."""

    request_id: RequestId


class Credit(FleetMessage, frozen=True, tag="Credit"):
    """Allow this many further chunks, because the reader took as many (coordinator to provider)."""

    request_id: RequestId
    chunks: Annotated[int, msgspec.Meta(ge=1, le=4096)]


class Began(FleetMessage, frozen=True, tag="Began"):
    """Announce an answer: chunks follow, under keys from this nonce (provider to coordinator)."""

    request_id: RequestId
    nonce: Bytes32


class Chunk(FleetMessage, frozen=True, tag="Chunk"):
    """Carry the next piece of an answer (provider to coordinator).

    ``tokens`` counts those so far, in all choices.
    """

    request_id: RequestId
    sealed: Annotated[bytes, msgspec.Meta(max_length=2 * 1024 * 1024)]
    tokens: Count
    last: bool


class Done(FleetMessage, frozen=True, tag="Done"):
    """Report the token counts to be paid for, after the last chunk (provider to coordinator)."""

    request_id: RequestId
    prompt_tokens: Count
    completion_tokens: Count


class Failed(FleetMessage, frozen=True, tag="Failed"):
    """Report that there is no answer, or no more of it (provider to coordinator).

    ``full``: the provider has no free slot, and nothing is wrong. ``refused``: the sealed body is wrong,
    which is the fault of the client that sealed it.
    """

    request_id: RequestId
    reason: Prose
    full: bool
    refused: bool = False


FromProvider = ProviderHello | Register | Proof | Heartbeat | DrainNotice | Began | Chunk | Done | Failed
FromCoordinator = ProviderChallenge | Registered | AwaitApproval | Refused | Prove | Serve | Cancel | Credit

_encoder = msgspec.msgpack.Encoder()
_from_provider: msgspec.msgpack.Decoder[FromProvider] = msgspec.msgpack.Decoder(FromProvider)
_from_coordinator: msgspec.msgpack.Decoder[FromCoordinator] = msgspec.msgpack.Decoder(FromCoordinator)


def encode_fleet(message: FleetMessage) -> bytes:
    """Return the bytes of one WebSocket message."""
    return _encoder.encode(message)


def decode_from_provider(data: bytes, most: int) -> FromProvider:
    """Decode a provider's message.

    Raises `FrameTooLong` over ``most`` bytes, and `FrameError`, without quoting them.
    """
    message = _decode(_from_provider, data, most, "provider")
    if isinstance(message, Register):
        if not all(offer.model.isprintable() for offer in message.offers):
            raise FrameError("a provider offers a model whose name cannot be printed")
        return msgspec.structs.replace(message, software=plain_text(message.software, 100))
    if isinstance(message, Failed):
        return msgspec.structs.replace(message, reason=plain_text(message.reason, 500))
    return message


def decode_from_coordinator(data: bytes, most: int) -> FromCoordinator:
    """Decode a coordinator's message. Raises as `decode_from_provider` does."""
    message = _decode(_from_coordinator, data, most, "coordinator")
    if isinstance(message, Refused):
        return msgspec.structs.replace(message, reason=plain_text(message.reason, 500))
    return message


M = TypeVar("M")


def _decode(decoder: msgspec.msgpack.Decoder[M], data: bytes, most: int, who: str) -> M:
    if len(data) > most:
        raise FrameTooLong(f"a message of the {who} has {len(data)} bytes, and the limit is {most}")
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"{len(data)} bytes of the {who} are not one of its messages") from None


def challenge_bytes(hello: ProviderHello, challenge: ProviderChallenge) -> bytes:
    """Return the bytes that a coordinator signs.

    They cover this hello, the address, the certificate and the challenge.
    """
    registers = _encoder.encode(challenge.registers)
    return prefixed(
        *(_CHALLENGE_LABEL, hello.nonce, hello.authority.encode()),
        *(challenge.certificate, challenge.nonce, registers),
    )


def registration_bytes(challenge: ProviderChallenge, authority: str, register: Register) -> bytes:
    """Return the bytes that a registration's signature covers.

    ``authority`` is the host:port of the coordinator, as dialled.
    """
    said = _encoder.encode(msgspec.structs.replace(register, signature=bytes(64)))
    return prefixed(_LABEL, challenge.coordinator, challenge.nonce, authority.encode(), said)


def request_key_bytes(request_key: bytes, expires_s: int) -> bytes:
    """Return the bytes that a provider signs for its request key. Clients seal to that key without asking
    it.
    """
    return prefixed(_KEY_LABEL, request_key, expires_s.to_bytes(8, "big"))


def proof_bytes(coordinator: bytes, nonce: bytes) -> bytes:
    """Return the bytes that a proof's signature covers."""
    return prefixed(_PROOF_LABEL, coordinator, nonce)
