"""Sign a model as an operator: the digest of its manifest, under the key that signs rosters.

    {"digest": "...", "hub": "org/name@commit", "model": "...", "operator": "...", "signature": "..."}
    {"files": ..., "tensors": ..., "version": 1}

The first line is signed. The second one is the manifest itself, and its SHA-256 is the digest. So every
holder of the file can check each tensor, although no machine has read all of them, and the file may come from
anywhere.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass, field

from convoy.crypto.identity import OperatorKey, verify
from convoy.crypto.keys import prefixed
from convoy.errors import HandshakeError, ModelError

_SIGN = "ask the operator for the file again: `convoy manifest sign` writes it"

# A manifest's limit, and the first line.
MAX_SIGNED_BYTES = (64 << 20) + 8192
_MAX_LINE_BYTES = 8192
_MAX_NAME = 512
_LABEL = b"convoy signed model v1"
_KEYS = {"digest", "hub", "model", "operator", "signature"}
_HEX = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class SignedModel:
    """Hold a verified signed model.

    ``hub`` is ``org/name@commit``, or empty; ``manifest`` is the encoding that has the ``digest``.
    """

    model: str
    hub: str
    digest: str
    operator: bytes
    manifest: bytes = field(repr=False)


def sign_model(model: str, hub: str, manifest: bytes, key: OperatorKey) -> bytes:
    """Return the file. ``manifest`` is a manifest's encoding, which has no line break."""
    digest = hashlib.sha256(manifest).hexdigest()
    said = {
        "digest": digest,
        "hub": hub,
        "model": model,
        "operator": key.public_key.hex(),
        "signature": base64.b64encode(key.sign(_text(model, hub, digest))).decode(),
    }
    return json.dumps(said, sort_keys=True).encode() + b"\n" + manifest + b"\n"


def verify_signed_model(data: bytes, *, operator_key: bytes) -> SignedModel:
    """Return the signed model.

    Raises ModelError for a file that this operator did not sign, or that was changed.
    """
    line, _, rest = data.partition(b"\n")
    manifest = rest.removesuffix(b"\n")
    said = _parse(line)
    if said["operator"] != operator_key.hex():
        raise ModelError(
            f"the model was signed by operator {said['operator'][:16]}..., "
            f"expected {operator_key.hex()[:16]}...",
            hint="sign it again with `convoy manifest sign`, with the key that signs the roster now",
        )
    signed = SignedModel(said["model"], said["hub"], said["digest"], operator_key, manifest)
    try:
        signature = base64.b64decode(said["signature"], validate=True)
        verify(operator_key, signature, _text(signed.model, signed.hub, signed.digest))
    except (ValueError, HandshakeError):
        raise ModelError(
            "the signature of the signed model does not hold: it was changed", hint=_SIGN
        ) from None
    # The signature covers only the digest, so the manifest is compared with it.
    found = hashlib.sha256(manifest).hexdigest()
    if found != signed.digest:
        raise ModelError(
            f"the manifest of the signed model has the digest {found[:12]}, expected {signed.digest[:12]}"
        )
    return signed


def _parse(line: bytes) -> dict[str, str]:
    try:
        said = json.loads(line) if len(line) <= _MAX_LINE_BYTES else None
    except (ValueError, RecursionError):
        said = None
    if not isinstance(said, dict) or set(said) != _KEYS:
        raise ModelError("this is no signed model", hint="`convoy manifest sign MODEL` writes one")
    is_text = all(isinstance(value, str) and len(value) <= _MAX_NAME for value in said.values())
    if not is_text or not _HEX.fullmatch(said["digest"]) or not _HEX.fullmatch(said["operator"]):
        raise ModelError("the first line of the signed model makes no sense", hint=_SIGN)
    return said


def _text(model: str, hub: str, digest: str) -> bytes:
    return prefixed(_LABEL, digest.encode(), model.encode(), hub.encode())
