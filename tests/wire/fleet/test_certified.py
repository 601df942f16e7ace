"""An operator's certificate for a provider: read back, expired, changed."""

from __future__ import annotations

import pytest

from convoy.crypto.identity import OperatorKey
from convoy.errors import ConfigError, ProviderError
from convoy.wire.fleet.certified import MAX_CERTIFICATE_BYTES, certify, read_certificate

KEY = bytes(range(32))


def test_a_certificate_that_was_changed_or_is_over_is_none() -> None:
    made = certify(OperatorKey.generate(), KEY, "three", 100)
    assert read_certificate(made, 99.0).identity == KEY
    with pytest.raises(ProviderError, match="expired"):
        read_certificate(made, 100.0)
    for place in range(len(made)):
        changed = bytearray(made)
        changed[place] ^= 1
        with pytest.raises(ProviderError):
            read_certificate(bytes(changed), 99.0)
    with pytest.raises(ProviderError):
        read_certificate(made + b"x", 99.0)


def test_a_certificate_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(ProviderError):
        read_certificate(bytes(MAX_CERTIFICATE_BYTES + 1), 99.0)


@pytest.mark.parametrize(
    ("identity", "name"), [(KEY[1:], "three"), (KEY, ""), (KEY, "x" * 256), (KEY, "a\n")]
)
def test_an_operator_certifies_only_a_key_and_a_printable_name(identity: bytes, name: str) -> None:
    with pytest.raises(ConfigError, match="a provider has a key of 32 bytes"):
        certify(OperatorKey.generate(), identity, name, 100)
