"""Appraise a provider: its members' evidence, its operator's roster and a policy give a level. No sockets.

A provider's level is its weakest member's. Every verifier decides by its own rules: the operators that it
believes about the members' TPMs, the demands on evidence, and the revoked keys.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

from convoy.errors import AttestationError, RosterError
from convoy.transport.member import Roster
from convoy.trust.evidence.evidence import Occasion, provider_binding, provider_purpose
from convoy.trust.evidence.level import Level, weakest
from convoy.trust.evidence.policy import Policy
from convoy.trust.evidence.verdict import Verdict
from convoy.trust.evidence.verify import VerificationContext, appraise
from convoy.trust.roster.roster import verify_roster
from convoy.wire.fleet.provider_evidence import MemberEvidence, ProviderEvidence, read_provider_evidence
from convoy.wire.messages.claims import Claims

NUM_BOOT_REGISTERS = 8


@dataclass(frozen=True, slots=True)
class ProviderRules:
    """Hold a verifier's rules for providers.

    Rosters of ``operators`` are believed. ``revoked`` are identity keys of providers and members.
    ``every_member``: all members that the roster lists must have sent evidence.
    """

    minimum: Level = Level.NONE
    policy: Policy = field(default_factory=Policy)
    operators: frozenset[bytes] = frozenset()
    revoked: frozenset[bytes] = frozenset()
    every_member: bool = False

    @property
    def registers(self) -> list[int]:
        """Return the TPM registers to ask for: those of the boot and of the policy.

        The boot's are always included, because other verifiers judge the same evidence by them.
        """
        return sorted({*range(NUM_BOOT_REGISTERS), *(rule.index for rule in self.policy.pcrs)})

    def require(self, verdict: ProviderVerdict) -> None:
        """Check a verdict's level. Raises `AttestationError` naming the member, its level and the least."""
        if verdict.level < self.minimum:
            raise AttestationError(
                f"{verdict.weakest} has level {verdict.level.text}, and the least that is taken here is "
                f"{self.minimum.text}: {verdict.why}"
            )

    def check_revoked(self, identity: bytes, who: str) -> None:
        """Check that a key was not revoked. Raises `AttestationError`."""
        if identity in self.revoked:
            raise AttestationError(f"the key of {who} was revoked here: {identity.hex()}")


@dataclass(frozen=True, slots=True)
class Claimant:
    """Name the sender of evidence: the key that it was reached by, and its present key for requests."""

    identity: bytes
    request_key: bytes
    expires_s: int


@dataclass(frozen=True, slots=True)
class Challenged:
    """Hold the coordinator's key and nonce that evidence must answer."""

    coordinator: bytes
    nonce: bytes


@dataclass(frozen=True, slots=True)
class ProviderVerdict:
    """Hold a provider's level with its reasons.

    ``absent`` are members that a believed roster lists and that sent nothing. ``roster_of`` is the operator
    of that roster.
    """

    level: Level
    members: tuple[Verdict, ...] = ()
    absent: tuple[str, ...] = ()
    roster_of: bytes | None = None
    reasons: tuple[str, ...] = ()

    @property
    def weakest(self) -> str:
        """Return the member that the level is of."""
        found = [one.member for one in self.members if one.level is self.level]
        return found[0] if found else (self.absent[0] if self.absent else "the provider")

    @property
    def why(self) -> str:
        """Return why the level is not a higher one, in one line."""
        reasons = [reason for one in self.members if one.level is self.level for reason in one.reasons]
        return "; ".join([*reasons, *self.reasons]) or "everything that was asked for was proved"


NO_EVIDENCE = ProviderVerdict(Level.NONE, reasons=("it sent no evidence",))


def appraise_provider(
    data: bytes,
    claimant: Claimant,
    rules: ProviderRules,
    own: Claims,
    *,
    challenged: Challenged | None,
    now: datetime.datetime,
) -> ProviderVerdict:
    """Return the level that a provider has here.

    ``own`` are the claims that the verifier would make, for rules that say "same". Without ``challenged`` the
    evidence is believed to be no older than the key for requests. Raises `AttestationError` for data that is
    no evidence of this provider at all. A member's invalid evidence gives a verdict instead.
    """
    rules.check_revoked(claimant.identity, "the provider")
    if not data:
        return NO_EVIDENCE
    found = read_provider_evidence(data, claimant.identity, claimant.request_key, claimant.expires_s)
    if challenged is not None and (found.coordinator, found.nonce) != (
        challenged.coordinator,
        challenged.nonce,
    ):
        raise AttestationError("the evidence answers another challenge than this one")
    _check_members(found, claimant, rules)
    roster, operator, untrusted = _roster(found, rules, now)
    if roster is not None:
        _check_listed(found, claimant, roster)
    judge = _Judge(found, claimant, rules, own, roster)
    verdicts = tuple(judge.verdict(one) for one in found.members)
    names = {one.name for one in found.members}
    absent = () if roster is None else tuple(one.name for one in roster.members if one.name not in names)
    level, reasons = weakest(one.level for one in verdicts), list(untrusted)
    if rules.every_member and (absent or roster is None):
        who = ", ".join(absent) if absent else "its other members"
        level = Level.NONE
        reasons.append(f"no evidence came of {who}, and every member of the roster must send it")
    return ProviderVerdict(level, verdicts, absent, operator, tuple(reasons))


def _check_members(found: ProviderEvidence, claimant: Claimant, rules: ProviderRules) -> None:
    names, keys = {one.name for one in found.members}, {one.identity for one in found.members}
    if len(names) != len(found.members) or len(keys) != len(found.members):
        raise AttestationError("the evidence names a member or a key twice")
    if claimant.identity not in keys:
        raise AttestationError("the evidence lacks the provider's own")
    for one in found.members:
        rules.check_revoked(one.identity, one.name)


def _roster(
    found: ProviderEvidence, rules: ProviderRules, now: datetime.datetime
) -> tuple[Roster | None, bytes | None, tuple[str, ...]]:
    """Return the roster and its operator, if a believed operator signed it; otherwise the reason why not."""
    if not found.roster:
        return None, None, ()
    # Handovers may lead from any trusted key to the signer, so each trusted key is tried.
    for operator in sorted(rules.operators):
        try:
            signed = verify_roster(found.roster, operator_key=operator)
        except RosterError:
            continue
        try:
            signed.roster.require_valid(now)
        except RosterError as error:
            raise AttestationError(f"of the provider's roster: {error.message}") from None
        return signed.roster, operator, ()
    return None, None, ("its roster is signed by no operator that is trusted here",)


def _check_listed(found: ProviderEvidence, claimant: Claimant, roster: Roster) -> None:
    listed = {member.name: member for member in roster.members}
    for one in found.members:
        member = listed.get(one.name)
        if member is None or member.identity_key != one.identity:
            raise AttestationError(
                f"the evidence of {one.name} is of no member that the provider's roster lists"
            )
        # Only a head may serve requests, so the provider itself must be one.
        if one.identity == claimant.identity and not member.head:
            raise AttestationError(f"the provider's roster does not allow {one.name} as a head")


@dataclass(frozen=True, slots=True)
class _Judge:
    """Hold the facts that are the same for all members."""

    found: ProviderEvidence
    claimant: Claimant
    rules: ProviderRules
    own: Claims
    roster: Roster | None

    def verdict(self, one: MemberEvidence) -> Verdict:
        found, claimant = self.found, self.claimant
        purpose = provider_purpose(found.coordinator, found.nonce, claimant.request_key, claimant.expires_s)
        context = VerificationContext(
            member=one.name,
            attestation_key=b"" if self.roster is None else self.roster.member(one.name).attestation_key,
            occasion=Occasion(provider_binding(claimant.identity), purpose, one.identity),
            registers=found.registers,
            own=self.own,
            # A standby holds no stage until it takes over.
            holds_stage=one.identity == claimant.identity,
        )
        return appraise(one.evidence, self.rules.policy, context)
