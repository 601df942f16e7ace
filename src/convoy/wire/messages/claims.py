"""What a member says of itself in its evidence: values, and the exact bytes that are signed and quoted."""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.errors import FrameError

Digest = Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")]
Short = Annotated[str, msgspec.Meta(max_length=255)]


class Claims(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Digests are SHA-256 in hex, or empty where unknown."""

    package: Digest  # over path and digest of every file of the installed package
    versions: Annotated[dict[Short, Short], msgspec.Meta(max_length=16)]  # of python and packages
    platform: Short
    model: Digest  # of the manifest of the model that is loaded in part
    layers: Annotated[list[Digest], msgspec.Meta(max_length=1024)]  # of each of its layers, from 0


_encoder = msgspec.msgpack.Encoder(order="sorted")
_decoder = msgspec.msgpack.Decoder(Claims)


def encode_claims(claims: Claims) -> bytes:
    """The bytes that evidence carries; a signature is over these, so nobody encodes them a second time."""
    return _encoder.encode(claims)


def decode_claims(data: bytes) -> Claims:
    """Raises `FrameError` without quoting the bytes."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise FrameError(f"the claims of {len(data)} bytes are not what evidence holds") from None
