"""The members that a provider's evidence covers: this process alone, or a head and its peers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from convoy.cluster.attestation.evidence_maker import EvidenceMaker
from convoy.cluster.attestation.evidence_relay import EvidenceRelay
from convoy.crypto.identity import Identity
from convoy.transport.link.link import Link
from convoy.transport.membership import Membership
from convoy.trust.evidence.evidence import Occasion, make_evidence, provider_binding
from convoy.wire.fleet.provider_evidence import (
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_ROSTER_BYTES,
    MemberEvidence,
)
from convoy.wire.messages.claims import encode_claims
from convoy.wire.messages.evidence import Vouched

if TYPE_CHECKING:
    from convoy.cluster.head.head import Head

_log = logging.getLogger(__name__)

DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class GatheredEvidence:
    """Hold the evidence of members. ``roster`` has the bytes that its operator signed; empty for none."""

    members: list[MemberEvidence]
    roster: bytes = field(default=b"", repr=False)


class OwnProcess:
    """Prove a provider outside any cluster: this process alone, and nothing of the servers behind it."""

    def __init__(
        self, identity: Identity, evidence_maker: EvidenceMaker | None = None, name: str = "provider"
    ) -> None:
        self._identity = identity
        self._name = name
        self._evidence_maker = evidence_maker or EvidenceMaker()

    def gather(self, purpose: bytes, registers: Sequence[int]) -> GatheredEvidence:  # noqa: ARG002 - of no TPM
        """Return evidence for this purpose; see `trust.evidence.evidence.provider_purpose`."""
        identity = self._identity
        occasion = Occasion(provider_binding(identity.public_key), purpose, identity.public_key)
        made = make_evidence(identity.sign, occasion, encode_claims(self._evidence_maker.claims))
        one = MemberEvidence(self._name, identity.public_key, made.claims, made.signature, "", [])
        return GatheredEvidence([one])


class HeadEvidence:
    """Gather the evidence of a head and its connected peers, standbys too. Each peer signs its own."""

    def __init__(
        self,
        me: Membership,
        relay: EvidenceRelay,
        peers: Callable[[], Iterable[Link]],
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._me = me
        self._relay = relay
        self._peers = peers
        self._deadline_s = deadline_s

    def gather(self, purpose: bytes, registers: Sequence[int]) -> GatheredEvidence:
        """Return the evidence that comes within the deadline.

        Waits for the slowest member. A member without evidence in time is left out.
        """
        links = [link for link in self._peers() if not link.is_over]
        found = {self._me.name: self._relay.own(purpose, registers)}
        found |= self._relay.gather(links, purpose, registers, self._deadline_s)
        roster, signed = self._me.roster, self._me.signed
        members: list[MemberEvidence] = []
        for member in roster.members:
            if (one := found.get(member.name)) is None:
                continue
            made = _relayed(member.name, member.identity_key, one)
            if made.num_bytes > MAX_MEMBER_BYTES or len(members) == MAX_MEMBERS:
                _log.warning("the evidence of %s is more than a coordinator takes", member.name)
                continue
            members.append(made)
        return GatheredEvidence(members, signed if len(signed) <= MAX_ROSTER_BYTES else b"")


def evidence_source_of(head: Head, identity: Identity) -> OwnProcess | HeadEvidence:
    """Return the source of evidence for a provider with this identity, for which ``head`` answers.

    A head with another identity was started without a roster of its owner. It proves this process alone.
    """
    me, attestation = head.membership, head.verifier.attestation

    if me.member.identity_key != identity.public_key:
        return OwnProcess(identity, attestation.evidence_maker)
    return HeadEvidence(me, attestation.relay, lambda: [link for link, _ in head.peers.present().values()])


def _relayed(name: str, identity: bytes, one: Vouched) -> MemberEvidence:
    return MemberEvidence(name, identity, one.claims, one.signature, one.kind, one.parts)
