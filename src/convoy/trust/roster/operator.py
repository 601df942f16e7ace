"""Hand a cluster over from one operator key to another: statements that both sign, and the walk along them.

A member trusts one key. A roster signed by another is believed only if handovers lead there from the trusted
one, each signed by the old key and by the new. They stand beside the roster's signature, because they are
judged before anything of the body is read.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from convoy.crypto.identity import OperatorKey, verify
from convoy.crypto.keys import prefixed
from convoy.errors import HandshakeError, RosterError
from convoy.trust.roster.text import check_keys, get

MAX_HANDOVERS = 32
_LABEL = b"convoy operator handover v1"
_KEYS = frozenset({"cluster_id", "epoch", "old", "new", "by_old", "by_new"})
_EPOCH_LIMIT = 2**63


@dataclass(frozen=True, slots=True)
class Handover:
    """State that from ``epoch`` on, ``new`` signs for the cluster in place of ``old`` (32 bytes each)."""

    cluster_id: str
    epoch: int
    old: bytes
    new: bytes
    by_old: bytes = field(repr=False)
    by_new: bytes = field(repr=False)

    def check(self) -> None:
        """Check both signatures. Raises `RosterError`."""
        text = _text(self.cluster_id, self.epoch, self.old, self.new)
        for key, signature in ((self.old, self.by_old), (self.new, self.by_new)):
            try:
                verify(key, signature, text)
            except HandshakeError:
                raise RosterError(
                    f"the handover to operator {self.new.hex()[:16]}... is not signed by {key.hex()[:16]}..."
                ) from None

    def encode(self) -> bytes:
        """Return all fields as bytes, for the signature of a roster that brings the handover."""
        text = _text(self.cluster_id, self.epoch, self.old, self.new)
        return prefixed(text, self.by_old, self.by_new)


def make_handover(cluster_id: str, epoch: int, old: OperatorKey, new: OperatorKey) -> Handover:
    """Return a handover that both keys signed. Raises `RosterError` if they are the same key."""
    if old.public_key == new.public_key:
        raise RosterError("the new operator key is the old one", hint="name a new folder with --new-operator")
    text = _text(cluster_id, epoch, old.public_key, new.public_key)
    return Handover(cluster_id, epoch, old.public_key, new.public_key, old.sign(text), new.sign(text))


def walk(trusted: bytes, signer: bytes, handovers: Sequence[Handover]) -> tuple[Handover, ...]:
    """Return the handovers that lead from ``trusted`` to ``signer``, each checked; none if they are one key.

    Raises `RosterError` if they do not lead there.
    """
    key, path = trusted, []
    left = list(handovers)
    while key != signer:
        step = next((handover for handover in left if handover.old == key), None)
        if step is None:
            raise RosterError(
                "the roster is signed by another operator",
                hint="compare the operator's public key in convoy.toml with the roster's last lines",
            )
        step.check()
        # Each handover serves once, so that a cycle ends.
        left.remove(step)
        path.append(step)
        key = step.new
    return tuple(path)


def check_path(path: Sequence[Handover], cluster_id: str, epoch: int) -> None:
    """Check that each handover is of this cluster, and for rosters from its epoch on.

    Raises `RosterError`.
    """
    before = 0
    for step in path:
        if step.cluster_id != cluster_id:
            raise RosterError(f"a handover is of cluster {step.cluster_id}, and the roster of {cluster_id}")
        if not before < step.epoch <= epoch:
            raise RosterError(
                f"a handover is for epoch {step.epoch}, expected {before + 1} to {epoch}, the roster's"
            )
        before = step.epoch


def handover_to_toml(handover: Handover) -> str:
    """Return one table for the end of a roster file."""
    return (
        "\n[[signature.handovers]]\n"
        f'cluster_id = "{handover.cluster_id}"\n'
        f"epoch = {handover.epoch}\n"
        f'old = "{handover.old.hex()}"\n'
        f'new = "{handover.new.hex()}"\n'
        f'by_old = "{base64.b64encode(handover.by_old).decode()}"\n'
        f'by_new = "{base64.b64encode(handover.by_new).decode()}"\n'
    )


def handovers_from(value: object) -> tuple[Handover, ...]:
    """Return the handovers of a roster file; reading verifies none of them. Raises `RosterError`."""
    if not isinstance(value, list) or len(value) > MAX_HANDOVERS:
        raise RosterError(f"the handovers are not a list of at most {MAX_HANDOVERS}")
    return tuple(_handover(table) for table in value)


def _handover(table: object) -> Handover:
    if not isinstance(table, Mapping):
        raise RosterError("a handover is not a table")
    fields: Mapping[str, Any] = table
    check_keys(fields, _KEYS, "a handover")
    epoch = get(fields, "epoch", int)
    if not 0 < epoch < _EPOCH_LIMIT:
        raise RosterError(f"a handover is for epoch {epoch}, expected 1 or more")
    try:
        old, new = (bytes.fromhex(get(fields, name, str)) for name in ("old", "new"))
        by_old, by_new = (
            base64.b64decode(get(fields, name, str), validate=True) for name in ("by_old", "by_new")
        )
    except (ValueError, binascii.Error):
        raise RosterError("the keys of a handover are not hex and base64") from None
    if len(old) != 32 or len(new) != 32:
        raise RosterError("a key of a handover has another length than 32 bytes")
    return Handover(get(fields, "cluster_id", str), epoch, old, new, by_old, by_new)


def _text(cluster_id: str, epoch: int, old: bytes, new: bytes) -> bytes:
    return prefixed(_LABEL, cluster_id.encode(), epoch.to_bytes(8, "big"), old, new)
