"""Define the messages between a proxy and a coordinator before a sealed body: JSON, with bytes as base64."""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from convoy.config.type_resolution import resolved
from convoy.crypto.sealed.request import (
    MAX_SEALED_BYTES,
    RequestFacts,
    key_id_of,
    most_body_bytes,
    sealed_size,
)
from convoy.errors import FrameError, RequestError
from convoy.fleet.consumer_request import BYTES_PER_TOKEN, MAX_CHOICES, MAX_TOKENS, ConsumerRequest
from convoy.wire.fleet.messages import (
    MAX_EVIDENCE_BYTES,
    Bytes32,
    Count,
    EvidenceBytes,
    Kind,
    Name,
    PublicKey,
    RequestId,
    Signature,
)

# The limit of a request for a lease.
MAX_LEASE_BYTES = 64 * 1024
MAX_LEASED_BYTES = MAX_LEASE_BYTES + (MAX_EVIDENCE_BYTES + 2) // 3 * 4
SEALED_TYPE = "application/vnd.convoy.sealed"
ANSWER_TYPE = "application/vnd.convoy.answer"

_Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEALED_BYTES)]
_Keys = Annotated[list[Bytes32], msgspec.Meta(max_length=1000)]


class LeaseAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold a proxy's request for a lease. It has no text, and no hash against which text could be tried.

    ``most_prompt_tokens`` is at least the number of bytes of the sealed body. ``tag`` and ``body_tag`` name
    the beginning and the whole, under a key of the proxy's. ``providers`` and ``operators`` are the keys that
    it trusts. ``level`` is the least that evidence must prove; the proxy also verifies the evidence by
    itself.
    """

    model: Name
    kind: Kind
    stream: bool
    prompt_tokens: _Positive
    most_prompt_tokens: _Positive
    max_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS * MAX_CHOICES * MAX_CHOICES)]
    tag: Bytes32
    body_tag: Bytes32
    providers: _Keys
    operators: _Keys
    level: Annotated[str, msgspec.Meta(pattern=r"^(none|self_signed|hardware)\Z")] = "none"

    @property
    def said(self) -> bytes:
        """Return the bytes that an Idempotency-Key stands for: the cost facts, and the proxy's body tag."""
        facts = self.model, self.kind, self.stream, self.most_prompt_tokens, self.max_tokens
        return "\n".join(map(str, facts)).encode() + b"\n" + self.body_tag

    def wanted(self, account: str) -> ConsumerRequest:
        """Return the request as the coordinator counts it, without a body."""
        return ConsumerRequest(
            kind=self.kind,
            model=self.model,
            stream=self.stream,
            max_tokens=self.max_tokens,
            prompt_tokens=self.prompt_tokens,
            most_prompt_tokens=self.most_prompt_tokens,
            body_bytes=most_body_bytes(self.most_prompt_tokens),
            tag=hashlib.sha256(f"{account}\n{self.model}\n".encode() + self.tag).digest(),
            body=b"",
        )


class Lease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold a coordinator's answer: seal to this provider, soon.

    The provider's own fields are as it sent them.
    """

    lease: RequestId
    request_id: RequestId
    # The sealed body must be opened by then, in Unix time.
    expires_s: Count
    provider: Name
    identity: Bytes32
    request_key: PublicKey
    request_key_expires_s: Count
    key_signature: Signature
    certificate: Annotated[bytes, msgspec.Meta(max_length=1024)]
    evidence: EvidenceBytes = b""


class Reseal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold a coordinator's answer to a sealed body: its provider failed, so seal it to another one."""

    reseal: Lease


def least_prompt_tokens(sealed_bytes: int) -> int:
    """Return a guess, as for a body in clear, at the shortest body that is padded to so many sealed bytes."""
    # Each step of the padding is at most half as long again as the one before.
    return max(1, (sealed_bytes - sealed_size(0)) * 2 // 3 // BYTES_PER_TOKEN)


def read_lease_asked(data: bytes) -> LeaseAsked:
    """Return a proxy's request for a lease. Raises `RequestError`."""
    try:
        asked = msgspec.json.decode(data, type=resolved(LeaseAsked))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("the body asks for no lease", code="invalid_lease") from None
    if not asked.model.isprintable():
        raise RequestError("model: expected the name of a model", param="model")
    return asked


L = TypeVar("L", Lease, Reseal)


def read_lease(data: bytes, kind: type[L]) -> L:
    """Return the coordinator's answer, on the proxy. Raises `FrameError`, without quoting the data."""
    try:
        return msgspec.json.decode(data, type=resolved(kind))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"{len(data)} bytes of the coordinator are no lease") from None


def facts_of(lease: Lease, wanted: ConsumerRequest) -> RequestFacts:
    """Return the facts that a body under this lease is bound to.

    The proxy and the coordinator know them all.
    """
    return RequestFacts(
        provider=lease.provider,
        key_id=key_id_of(lease.request_key),
        model=wanted.model,
        request_id=lease.request_id,
        lease=lease.lease.encode(),
        expires_s=lease.expires_s,
        max_tokens=wanted.max_tokens,
        kind=wanted.kind,
    )
