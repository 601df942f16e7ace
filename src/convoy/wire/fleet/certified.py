"""An operator's certificate for a provider, which a proxy believes that pins only the operator's key."""

from __future__ import annotations

from typing import Annotated

import msgspec

from convoy.crypto.identity import OperatorKey, verify
from convoy.crypto.keys import prefixed
from convoy.errors import ConfigError, ConvoyError, ProviderError

MAX_CERTIFICATE_BYTES = 1024

_LABEL = b"convoy provider certificate v1"

_Key = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class ProviderCertificate(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="ProviderCertificate"
):
    """Certify that a provider belongs to an operator.

    ``signature`` is the operator's, over all fields before it. ``expires_s`` is Unix time.
    """

    operator: _Key
    identity: _Key
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    expires_s: Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
    signature: Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


_decoder = msgspec.msgpack.Decoder(ProviderCertificate)


def certify(operator: OperatorKey, identity: bytes, name: str, expires_s: int) -> bytes:
    """Return a certificate, on the operator's machine. Raises `ConfigError` for an invalid name or key."""
    if not (1 <= len(name) <= 255 and name.isprintable()) or len(identity) != 32:
        raise ConfigError(
            f"a provider has a key of 32 bytes and a name, not {len(identity)} and {len(name)} characters"
        )
    signature = operator.sign(_signed(operator.public_key, identity, name, expires_s))
    made = ProviderCertificate(operator.public_key, identity, name, expires_s, signature)
    return msgspec.msgpack.encode(made)


def read_certificate(data: bytes, now_s: float) -> ProviderCertificate:
    """Return a certificate with a valid signature and time, of any operator. Raises `ProviderError`."""
    try:
        if len(data) > MAX_CERTIFICATE_BYTES:
            raise ProviderError("too long")
        found = _decoder.decode(data)
        verify(
            found.operator,
            found.signature,
            _signed(found.operator, found.identity, found.name, found.expires_s),
        )
    except (msgspec.DecodeError, UnicodeDecodeError, ConvoyError):
        raise ProviderError("a provider's certificate is none, or not signed by its operator") from None
    if found.expires_s <= now_s:
        raise ProviderError("a provider's certificate has expired")
    return found


def _signed(operator: bytes, identity: bytes, name: str, expires_s: int) -> bytes:
    return prefixed(_LABEL, operator, identity, name.encode(), expires_s.to_bytes(8, "big"))
