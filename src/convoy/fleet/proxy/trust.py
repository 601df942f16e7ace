"""Decide to which providers a proxy seals: those with keys that it was given, or with operators' keys.

A key that only the coordinator names is never trusted.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.crypto.identity import verify
from convoy.crypto.keys import prefixed
from convoy.errors import AttestationError, ConvoyError, ProviderError, Unavailable
from convoy.fleet.lease import Lease
from convoy.fleet.provider_verifier import ProviderVerifier
from convoy.trust.evidence.provider import Claimant, ProviderRules, ProviderVerdict
from convoy.wire.fleet.certified import read_certificate
from convoy.wire.fleet.messages import request_key_bytes

_MAX_KEY_S = 24 * 3600 + 60
_MAX_LEASE_S = 3600
# How long a verdict on the same evidence stands, and how many verdicts are kept.
_JUDGED_S, _MAX_JUDGED = 60.0, 256


class Untrusted(Unavailable):
    """Signal a lease that nothing is sealed under, with the reason."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint=hint, public=f"{message} ({hint})")


@dataclass(frozen=True, slots=True)
class Trust:
    """Hold the trusted Ed25519 keys of providers and of operators, and the rules for evidence."""

    providers: frozenset[bytes] = frozenset()
    operators: frozenset[bytes] = frozenset()
    rules: ProviderRules = field(default_factory=ProviderRules)


@dataclass(slots=True)
class LeaseCheck:
    """Check leases, and remember those that it saw as long as they might be used."""

    trust: Trust
    now: Callable[[], float] = time.time
    _seen: dict[str, int] = field(default_factory=dict)
    _judged: dict[bytes, tuple[float, ProviderVerdict]] = field(default_factory=dict)
    _verifier: ProviderVerifier = field(init=False)

    def __post_init__(self) -> None:
        self._verifier = ProviderVerifier(self.trust.rules)

    def check(self, lease: Lease) -> ProviderVerdict:
        """Return the verdict on the provider's evidence. Raises `Untrusted`."""
        now_s = self.now()
        self._check_provider(lease, now_s)
        try:
            said = request_key_bytes(lease.request_key, lease.request_key_expires_s)
            verify(lease.identity, lease.key_signature, said)
        except ConvoyError:
            raise _odd("the key to seal to is not signed by its provider") from None
        if not now_s < lease.request_key_expires_s <= now_s + _MAX_KEY_S:
            raise _odd("the provider's key to seal to has expired, or lives longer than a day")
        if not now_s < lease.expires_s <= now_s + _MAX_LEASE_S:
            raise _odd("the lease has expired, or lives longer than an hour")
        self._seen = {name: until for name, until in self._seen.items() if until > now_s}
        if lease.request_id in self._seen or lease.lease in self._seen:
            raise _odd("the coordinator gave the same lease twice")
        self._seen[lease.request_id] = self._seen[lease.lease] = lease.expires_s
        return self._judge(lease)

    def _judge(self, lease: Lease) -> ProviderVerdict:
        """Verify the evidence without a challenge of its own.

        So the evidence may be as old as the key for requests, and no older.
        """
        claimant, now_s = Claimant(lease.identity, lease.request_key, lease.request_key_expires_s), self.now()
        # The signature covers the key and its expiry.
        said = (lease.identity, lease.key_signature, lease.evidence)
        name = hashlib.sha256(prefixed(*said)).digest()
        if name in self._judged and now_s - self._judged[name][0] < _JUDGED_S:
            return self._judged[name][1]
        try:
            verdict = self._verifier.verify(lease.evidence, claimant)
        except AttestationError as error:
            raise _odd(error.message) from None
        if len(self._judged) >= _MAX_JUDGED:
            self._judged.clear()
        self._judged[name] = now_s, verdict
        return verdict

    def _check_provider(self, lease: Lease, now_s: float) -> None:
        if lease.identity in self.trust.providers:
            return
        if lease.certificate and self.trust.operators:
            try:
                found = read_certificate(lease.certificate, now_s)
            except ProviderError as error:
                raise _odd(error.message) from None
            if found.identity == lease.identity and found.operator in self.trust.operators:
                return
        raise Untrusted(
            "no provider that this proxy trusts is available",
            f"if it is yours, trust the provider with key {lease.identity.hex()}, or its operator",
        )


def _odd(message: str) -> Untrusted:
    return Untrusted(message, "nothing was sent; ask the operator of the coordinator or the provider")
