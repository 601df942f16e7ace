"""Appraisal (RFC 9334): evidence and a policy give a verdict. Pure; every refusal has its reason.

1. the identity key's signature over everything, for this link and this challenge: without it, ``none``
2. the claims meet the policy's [attestation.software]: without that, ``none``
3. a statement of enrolled hardware holds, and its registers meet the policy: ``hardware``; otherwise
   ``self_signed``
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from convoy.crypto.identity import verify
from convoy.crypto.tpm.structures import (
    PCR_BYTES,
    Quote,
    check_attestation_key,
    check_signature,
    parse_public,
    parse_quote,
    pcr_digest,
)
from convoy.errors import AttestationError, FrameError, HandshakeError
from convoy.trust.evidence.evidence import Occasion, evidence_bytes, qualifying_data
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import Policy, SoftwareRule
from convoy.trust.evidence.verdict import Verdict
from convoy.wire.messages.claims import Claims, decode_claims
from convoy.wire.messages.evidence import Evidence

TPM2 = "tpm2"
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class VerificationContext:
    """Hold the facts that the verifier knows by itself.

    ``attestation_key`` is the enrolled one, empty for none.

    ``registers`` are those that the challenge asked for. ``own`` are the claims that the verifier would make.
    ``holds_stage``: the member runs a part of a model, so it must name the model.
    """

    member: str
    attestation_key: bytes
    occasion: Occasion
    registers: Sequence[int]
    own: Claims
    holds_stage: bool = False


class HardwareKind(Protocol):
    """Appraise the statements of one kind of hardware: an entry in `KINDS`, with an `evidence_maker`."""

    def appraise(self, evidence: Evidence, policy: Policy, context: VerificationContext) -> dict[str, str]:
        """Return the statement's content, as text for people.

        The statement must hold the `qualifying_data` of the context, be signed under
        ``context.attestation_key`` and meet the policy. Raises `AttestationError` with the reason otherwise.
        """


class TpmQuote:
    """Appraise a TPM's quote.

    Its parts are the attestation key's public area, the quote, its signature, then the value of each
    register.
    """

    def appraise(self, evidence: Evidence, policy: Policy, context: VerificationContext) -> dict[str, str]:
        if len(evidence.parts) < 3:
            raise AttestationError(
                f"the quote came in {len(evidence.parts)} parts, expected 3 and the registers"
            )
        public_area, quoted, signature, *values = evidence.parts
        public = parse_public(public_area)
        if public.key_der != context.attestation_key:
            raise AttestationError("the quote is by another key than the enrolled attestation key")
        # The roster keeps the key without its attributes. The signer's name in the quote binds them.
        check_attestation_key(public)
        check_signature(public, signature, quoted)
        quote = parse_quote(quoted)
        if quote.signer != public.endorsement_name:
            raise AttestationError("the quote names another signer than the enrolled attestation key")
        # The hardware signs this value with its registers, so a replayed quote or foreign claims fail here.
        if quote.extra != qualifying_data(context.occasion, evidence.claims):
            raise AttestationError("the quote is for another challenge, link, member or claims")
        registers = _registers(quote, values, context.registers)
        _check_registers(registers, policy, context.member)
        return {
            "clock_ms": str(quote.clock_ms),
            "resets": str(quote.reset_count),
            "restarts": str(quote.restart_count),
            "firmware": f"{quote.firmware:016x}",
            **{f"pcr_{index}": value.hex() for index, value in registers.items()},
        }


KINDS: dict[str, HardwareKind] = {TPM2: TpmQuote()}


def appraise(evidence: Evidence, policy: Policy, context: VerificationContext) -> Verdict:
    """Return the verdict on this evidence under this policy. Never raises for anything in the evidence."""
    try:
        _check_identity(evidence, context)
        claims = decode_claims(evidence.claims)
    except (HandshakeError, FrameError) as error:
        return Verdict(context.member, Level.NONE, (error.message,))
    # All drifts are reported together, so that the operator mends them at once.
    drifts = [reason for rule in policy.software if (reason := _drift(rule, claims, context))]
    if drifts:
        return Verdict(context.member, Level.NONE, tuple(drifts))
    try:
        facts = _hardware(evidence, policy, context)
    except AttestationError as error:
        return Verdict(context.member, Level.SELF_SIGNED, (error.message,))
    return Verdict(context.member, Level.HARDWARE, (), facts)


def asked_registers(policy: Policy, member: str) -> list[int]:
    """Return the registers that a challenge asks ``member`` to quote.

    They are those of its rules, or without rules those of the boot (0-7).
    """
    return sorted({rule.index for rule in policy.pcrs_of(member)}) or list(range(8))


def _check_identity(evidence: Evidence, context: VerificationContext) -> None:
    signed = evidence_bytes(context.occasion, evidence.claims, evidence.kind, evidence.parts)
    try:
        verify(context.occasion.identity_key, evidence.signature, signed)
    except HandshakeError:
        raise HandshakeError(
            f"the evidence is not signed by {context.member}'s identity key for this challenge and link"
        ) from None


def _drift(rule: SoftwareRule, claims: Claims, context: VerificationContext) -> str | None:
    """Return why a claim breaks its rule, or None."""
    if rule.claim == "model":
        nothing_there = not claims.model and not context.holds_stage
        nothing_to_compare = not rule.values and not context.own.model
        if nothing_there or nothing_to_compare:
            # One of the two has loaded no model, so there is nothing to compare.
            return None
    value = claim_of(claims, rule.claim)
    allowed = rule.values or (claim_of(context.own, rule.claim),)
    if value in allowed:
        return None
    # Three values are enough for a message.
    expected = " or ".join(_shown(one) for one in allowed[:3])
    return f"{context.member} says that its {rule.claim} is {_shown(value)}, expected {expected}"


def claim_of(claims: Claims, name: str) -> str:
    """Return one claim by the name that policies use; empty if it is not there."""
    if name in {"package", "platform", "model"}:
        return str(getattr(claims, name))
    return claims.versions.get(name, "")


def _shown(text: str) -> str:
    # The text comes from another machine and goes into logs and terminals.
    return "".join(c if c.isprintable() else "?" for c in text[:_MAX_SHOWN]) or "unknown"


def _hardware(evidence: Evidence, policy: Policy, context: VerificationContext) -> dict[str, str]:
    if not context.attestation_key:
        raise AttestationError(f"no attestation key of {context.member} is enrolled in the roster")
    if not evidence.kind:
        raise AttestationError(f"{context.member} has an enrolled attestation key and sent no quote of it")
    kind = KINDS.get(evidence.kind)
    if kind is None:
        raise AttestationError(f"{_shown(evidence.kind)} is no kind of hardware that is known here")
    return kind.appraise(evidence, policy, context)


def _registers(quote: Quote, values: Sequence[bytes], asked: Sequence[int]) -> dict[int, bytes]:
    # A quote over other registers could leave out the one that changed.
    if quote.pcrs != tuple(asked):
        wanted, got = (",".join(map(str, some)) or "none" for some in (asked, quote.pcrs))
        raise AttestationError(f"the quote is over the registers {got}, expected {wanted}")
    if len(values) != len(asked) or any(len(value) != PCR_BYTES for value in values):
        raise AttestationError(
            f"{len(values)} register values came, expected {len(asked)} of {PCR_BYTES} bytes each"
        )
    # The quote signs only a digest; the values come beside it and must give the same digest.
    if pcr_digest(values) != quote.pcr_digest:
        raise AttestationError("the register values that came are not those in the quote")
    return dict(zip(asked, values, strict=True))


def _check_registers(registers: dict[int, bytes], policy: Policy, member: str) -> None:
    rules = policy.pcrs_of(member)
    if policy.require_pcrs and not rules:
        raise AttestationError(f"the policy requires rules for registers and has none for {member}")
    for rule in rules:
        value = registers.get(rule.index)
        if value not in rule.values:
            shown = "missing" if value is None else value.hex()
            raise AttestationError(f"register {rule.index} is {shown}, which the policy does not accept")
