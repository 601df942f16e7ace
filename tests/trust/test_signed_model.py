"""Verify a manifest under the operator's key: changed ones, and those of another key, are refused."""

from __future__ import annotations

import json

import pytest

from convoy.crypto.identity import OperatorKey
from convoy.errors import ModelError
from convoy.trust.signed_model import sign_model, verify_signed_model

KEY = OperatorKey.generate()
MANIFEST = b'{"files":{},"tensors":{},"version":1}'
SIGNED = sign_model("odd", "somebody/odd@" + "5f" * 20, MANIFEST, KEY)


def test_what_was_signed_is_read_as_it_was() -> None:
    signed = verify_signed_model(SIGNED, operator_key=KEY.public_key)
    assert (signed.model, signed.hub, signed.manifest) == ("odd", "somebody/odd@" + "5f" * 20, MANIFEST)


def test_what_another_operator_signed_is_refused_with_both_keys() -> None:
    other = OperatorKey.generate()
    said = f"signed by operator {KEY.public_key.hex()[:16]}..., expected {other.public_key.hex()[:16]}"
    with pytest.raises(ModelError, match=said):
        verify_signed_model(SIGNED, operator_key=other.public_key)


@pytest.mark.parametrize("field", ["digest", "hub", "model", "signature"])
def test_a_first_line_that_was_changed_is_refused(field: str) -> None:
    line, rest = SIGNED.split(b"\n", 1)
    said = json.loads(line)
    said[field] = said[field][1:] + said[field][0]
    with pytest.raises(ModelError, match="the signature of the signed model does not hold"):
        verify_signed_model(json.dumps(said).encode() + b"\n" + rest, operator_key=KEY.public_key)


def test_a_manifest_that_was_changed_is_refused_with_both_digests() -> None:
    changed = SIGNED.replace(b'"tensors":{}', b'"tensors":[]')
    with pytest.raises(ModelError, match=r"has the digest [0-9a-f]{12}, expected [0-9a-f]{12}"):
        verify_signed_model(changed, operator_key=KEY.public_key)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[" * 5000, b"{}", b"[1]", b'{"digest":1}', b"x" * 10_000])
def test_what_is_no_signed_model_is_refused(data: bytes) -> None:
    with pytest.raises(ModelError, match="this is no signed model"):
        verify_signed_model(data, operator_key=KEY.public_key)


def test_a_first_line_of_another_form_is_refused() -> None:
    said = json.loads(SIGNED.split(b"\n")[0]) | {"operator": 7}
    with pytest.raises(ModelError, match="makes no sense"):
        verify_signed_model(json.dumps(said).encode(), operator_key=KEY.public_key)
