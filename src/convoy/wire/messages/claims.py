"""The claims of a member about itself in its evidence, and the exact bytes that are signed and quoted."""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.errors import FrameError

Digest = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Short = Annotated[str, msgspec.Meta(max_length=255)]


class Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """State what software and model a member runs. Digests are SHA-256 in hex, or empty where unknown."""

    # Over the path and digest of every file of the installed package.
    package: Digest
    # The versions of Python and of packages, by name.
    versions: Annotated[dict[Short, Short], msgspec.Meta(max_length=16)]
    platform: Short
    # The digest of the manifest of the model, of which the member has loaded a part.
    model: Digest
    # The digest of each of the model's layers, from layer 0 on.
    layers: Annotated[list[Digest], msgspec.Meta(max_length=1024)]


_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder = msgspec.msgpack.Decoder(Claims)


def encode_claims(claims: Claims) -> bytes:
    """Return the bytes that evidence carries. A signature covers them, so they are encoded only once."""
    return _encoder.encode(claims)


def decode_claims(data: bytes) -> Claims:
    """Return the claims. Raises `FrameError` without quoting the bytes."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"the claims of {len(data)} bytes are not what evidence holds") from None
