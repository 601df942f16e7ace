"""Show evidence of a provider and its members, anew for each challenge of its coordinator.

It is apart from the connection so that everything a provider reveals about itself stands in one place.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from convoy.cluster.head.provider_evidence import GatheredEvidence
from convoy.crypto.identity import Identity
from convoy.errors import ConvoyError
from convoy.trust.evidence.evidence import provider_purpose
from convoy.wire.fleet.provider_evidence import ProviderEvidence, sign_provider_evidence

_log = logging.getLogger(__name__)


class EvidenceSource(Protocol):
    """Gather the members' evidence. `cluster.head.provider_evidence` has the implementations."""

    def gather(self, purpose: bytes, registers: Sequence[int]) -> GatheredEvidence: ...


@dataclass(frozen=True, slots=True)
class EvidencePresenter:
    """Sign the gathered evidence with the provider's identity, for its present key for requests."""

    source: EvidenceSource
    identity: Identity
    request_key: bytes
    expires_s: int

    async def show(self, coordinator: bytes, nonce: bytes, registers: Sequence[int]) -> bytes:
        """Return the bytes for the coordinator, or none if nothing can be shown.

        Takes as long as the members do.
        """
        try:
            return await asyncio.to_thread(self._show, coordinator, nonce, registers)
        except ConvoyError as error:
            _log.warning("no evidence for the coordinator: %s", error.message)
            return b""

    def _show(self, coordinator: bytes, nonce: bytes, registers: Sequence[int]) -> bytes:
        purpose = provider_purpose(coordinator, nonce, self.request_key, self.expires_s)
        found = self.source.gather(purpose, registers)
        made = ProviderEvidence(coordinator, nonce, list(registers), found.roster, found.members)
        return sign_provider_evidence(made, self.request_key, self.expires_s, self.identity.sign)
