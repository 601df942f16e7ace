"""Verify providers' evidence by the rules of the coordinator's or the proxy's operator."""

from __future__ import annotations

import asyncio
import datetime
import functools

from convoy.cluster.attestation.claims import own_claims
from convoy.trust.evidence.provider import (
    Challenged,
    Claimant,
    ProviderRules,
    ProviderVerdict,
    appraise_provider,
)
from convoy.wire.messages.claims import Claims


class ProviderVerifier:
    """Verify evidence. Threads may share it."""

    def __init__(self, rules: ProviderRules, own: Claims | None = None) -> None:
        """Set the rules.

        ``own`` are the claims that this process would make of its software, for rules that say "same".
        """
        self.rules = rules
        self._known = own

    @functools.cached_property
    def _own(self) -> Claims:
        """Return this process's claims.

        Only a rule that says "same" needs them: they read every file of the package.
        """
        if self._known is None and all(rule.values for rule in self.rules.policy.software):
            return Claims("", {}, "", "", [])
        return self._known or own_claims()

    def verify(
        self, evidence: bytes, claimant: Claimant, challenged: Challenged | None = None
    ) -> ProviderVerdict:
        """Return a verdict that suffices. Raises `AttestationError` with the reason for one that does not."""
        now = datetime.datetime.now(datetime.UTC)
        verdict = appraise_provider(evidence, claimant, self.rules, self._own, challenged=challenged, now=now)
        self.rules.require(verdict)
        return verdict

    async def verify_on_thread(
        self, evidence: bytes, claimant: Claimant, challenged: Challenged
    ) -> ProviderVerdict:
        """Verify on a thread, because a large cluster's signatures take milliseconds. See `verify`."""
        return await asyncio.to_thread(self.verify, evidence, claimant, challenged)
