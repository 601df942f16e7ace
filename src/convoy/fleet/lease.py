"""What a proxy and a coordinator say to each other before a sealed body: JSON, bytes in it as base64."""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal, TypeVar

import msgspec

from convoy.crypto.sealed.request import (
    MAX_SEALED_BYTES,
    RequestFacts,
    key_id_of,
    most_body_bytes,
    sealed_size,
)
from convoy.errors import FrameError, RequestError
from convoy.fleet.asked import BYTES_PER_TOKEN, MAX_CHOICES, MAX_TOKENS, Wanted
from convoy.wire.fleet.messages import (
    MAX_EVIDENCE_BYTES,
    Bytes32,
    Count,
    EvidenceBytes,
    Name,
    PublicKey,
    RequestId,
    Signature,
)

MAX_LEASE_BYTES = 64 * 1024  # of what is asked
MAX_LEASED_BYTES = MAX_LEASE_BYTES + (MAX_EVIDENCE_BYTES + 2) // 3 * 4
SEALED_TYPE = "application/vnd.convoy.sealed"
ANSWER_TYPE = "application/vnd.convoy.answer"

_Positive = Annotated[int, msgspec.Meta(ge=1, le=MAX_SEALED_BYTES)]
_Keys = Annotated[list[Bytes32], msgspec.Meta(max_length=1000)]


class LeaseAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Proxy to coordinator. Nothing in it is text of the request, nor a hash that text could be tried on.

    ``most_prompt_tokens``: at least as many as the sealed body has bytes. ``tag`` and ``body_tag`` are of the
    beginning and of the whole, under a key of the proxy's. ``providers`` and ``operators``: whose it trusts.
    ``level``: the least that evidence must prove; the proxy judges for itself what it is given.
    """

    model: Name
    kind: Literal["chat", "completion"]
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
        """What an Idempotency-Key is of: what a request may cost, and what its proxy calls its body."""
        facts = self.model, self.kind, self.stream, self.most_prompt_tokens, self.max_tokens
        return "\n".join(map(str, facts)).encode() + b"\n" + self.body_tag

    def wanted(self, account: str) -> Wanted:
        """As the coordinator counts it: without a body."""
        return Wanted(
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
    """Coordinator to proxy: seal to this provider, soon. The provider's own words are as it sent them."""

    lease: RequestId
    request_id: RequestId
    expires_s: Count  # of the sealed body, Unix time
    provider: Name
    identity: Bytes32
    request_key: PublicKey
    request_key_expires_s: Count
    key_signature: Signature
    certificate: Annotated[bytes, msgspec.Meta(max_length=1024)]
    evidence: EvidenceBytes = b""


class Reseal(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Coordinator to proxy, in answer to a sealed body: its provider failed, seal it to another."""

    reseal: Lease


def least_prompt_tokens(sealed_bytes: int) -> int:
    """A guess, as for a body in clear, at the shortest body that is padded to so many sealed bytes."""
    # each step of the padding is at most half as long again as the one before
    return max(1, (sealed_bytes - sealed_size(0)) * 2 // 3 // BYTES_PER_TOKEN)


def read_lease_asked(data: bytes) -> LeaseAsked:
    """Raises `RequestError`."""
    try:
        asked = msgspec.json.decode(data, type=LeaseAsked)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("the body asks for no lease", code="invalid_lease") from None
    if not asked.model.isprintable():
        raise RequestError("model: expected the name of a model", param="model")
    return asked


L = TypeVar("L", Lease, Reseal)


def read_lease(data: bytes, kind: type[L]) -> L:
    """On the proxy. Raises `FrameError`, without quoting what came."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"{len(data)} bytes of the coordinator are no lease") from None


def facts_of(lease: Lease, wanted: Wanted) -> RequestFacts:
    """What a body under this lease is bound to; the proxy and the coordinator both know all of it."""
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
