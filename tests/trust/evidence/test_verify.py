"""Evidence against what an attacker, a broken TPM and a changed machine make of it: each has its reason."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.crypto.tpm.structures import parse_public
from convoy.trust.evidence.evidence import Occasion, make_evidence, qualifying_data
from convoy.trust.evidence.level import Level, weakest
from convoy.trust.evidence.policy import PcrRule, Policy, SoftwareRule
from convoy.trust.evidence.verdict import Verdict
from convoy.trust.evidence.verify import VerificationContext, appraise, asked_registers
from convoy.wire.messages.claims import Claims, decode_claims, encode_claims
from convoy.wire.messages.evidence import Evidence
from support.examples import examples
from support.tpm_vectors import IDENTITY, IDENTITY_KEY, LyingTpm, recorded, recorded_parts, vectors

BINDING, NONCE = bytes.fromhex(vectors()["binding"]), bytes.fromhex(vectors()["nonce"])
OCCASION = Occasion(BINDING, NONCE, IDENTITY_KEY)
CLAIMS = recorded("claims")
REGISTERS: list[int] = vectors()["registers"]
ZERO = bytes(32)


def enrolled(parts: list[bytes]) -> bytes:
    return parse_public(parts[0]).key_der


def context(key: bytes, **changes: object) -> VerificationContext:
    made = VerificationContext("beta", key, OCCASION, REGISTERS, decode_claims(CLAIMS))
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def evidence(
    parts: list[bytes], *, occasion: Occasion = OCCASION, claims: bytes = CLAIMS, kind: str = "tpm2"
) -> Evidence:
    return make_evidence(IDENTITY.sign, occasion, claims, (kind, parts))


def judge(parts: list[bytes], policy: Policy | None = None, *, key: bytes | None = None) -> Verdict:
    return appraise(evidence(parts), policy or Policy(), context(enrolled(parts) if key is None else key))


def refused(verdict: Verdict, reason: str, level: Level = Level.SELF_SIGNED) -> None:
    assert verdict.level is level
    assert any(reason in given for given in verdict.reasons), verdict.reasons


@pytest.mark.parametrize("algorithm", ["ecc", "rsa"])
def test_a_recorded_quote_of_an_enrolled_key_is_hardware(algorithm: str) -> None:
    parts = recorded_parts(algorithm)
    rules = tuple(PcrRule(index, (ZERO, value)) for index, value in zip(REGISTERS, parts[3:], strict=True))
    verdict = judge(parts, Policy(minimum=Level.HARDWARE, pcrs=rules, require_pcrs=True))
    assert verdict.level is Level.HARDWARE
    assert not verdict.reasons
    assert verdict.facts["pcr_16"] == parts[5].hex()
    assert int(verdict.facts["clock_ms"]) > 0


def test_without_an_enrolled_key_a_good_quote_is_self_signed() -> None:
    refused(judge(recorded_parts("ecc"), key=b""), "no attestation key of beta is enrolled")


def test_an_enrolled_machine_that_sends_no_quote_is_self_signed() -> None:
    verdict = appraise(evidence([], kind=""), Policy(), context(enrolled(recorded_parts("ecc"))))
    refused(verdict, "sent no quote")


def test_an_unknown_kind_of_hardware_is_no_hardware() -> None:
    parts = recorded_parts("ecc")
    verdict = appraise(evidence(parts, kind="sev-snp\n"), Policy(), context(enrolled(parts)))
    refused(verdict, "sev-snp? is no kind of hardware that is known here")


def test_evidence_for_another_challenge_is_none() -> None:
    parts = recorded_parts("ecc")
    other = dataclasses.replace(OCCASION, nonce=b"\x23" * 32)
    verdict = appraise(evidence(parts), Policy(), context(enrolled(parts), occasion=other))
    refused(verdict, "not signed by beta's identity key for this challenge and link", Level.NONE)


def test_evidence_replayed_on_another_link_is_none() -> None:
    parts = recorded_parts("ecc")
    other = dataclasses.replace(OCCASION, binding=b"\x12" * 32)
    verdict = appraise(evidence(parts), Policy(), context(enrolled(parts), occasion=other))
    refused(verdict, "not signed by beta's identity key for this challenge and link", Level.NONE)


def test_evidence_of_another_identity_is_none() -> None:
    parts = recorded_parts("ecc")
    other = dataclasses.replace(OCCASION, identity_key=b"\x13" * 32)
    refused(
        appraise(evidence(parts), Policy(), context(enrolled(parts), occasion=other)),
        "identity key",
        Level.NONE,
    )


@pytest.mark.parametrize("changed", ["nonce", "binding", "identity_key"])
def test_a_quote_taken_for_another_occasion_and_signed_anew_is_not_hardware(changed: str) -> None:
    """A member that relays another machine's quote under its own signature."""
    tpm = LyingTpm()
    values = [ZERO] * 3
    extra = qualifying_data(dataclasses.replace(OCCASION, **{changed: b"\x14" * 32}), CLAIMS)
    refused(judge(tpm.quote(extra, values)), "another challenge, link, member or claims")


def test_claims_changed_after_the_quote_are_not_hardware() -> None:
    parts = recorded_parts("ecc")
    claims = encode_claims(msgspec.structs.replace(decode_claims(CLAIMS), package="cd" * 32))
    verdict = appraise(evidence(parts, claims=claims), Policy(), context(enrolled(parts)))
    refused(verdict, "another challenge, link, member or claims")


def test_claims_changed_on_the_way_are_none() -> None:
    parts = recorded_parts("ecc")
    sent = msgspec.structs.replace(evidence(parts), claims=CLAIMS[:-1] + b"\x91")
    refused(appraise(sent, Policy(), context(enrolled(parts))), "not signed", Level.NONE)


def test_signed_claims_that_are_no_claims_are_none() -> None:
    verdict = appraise(evidence([], claims=b"\x90", kind=""), Policy(), context(b""))
    refused(verdict, "not what evidence holds", Level.NONE)


def test_another_attestation_key_than_the_enrolled_one_is_not_hardware() -> None:
    """Another machine's TPM, however good its quote is."""
    key = enrolled(recorded_parts("ecc"))
    refused(judge(recorded_parts("other_machine"), key=key), "another key than the enrolled")


def test_an_unrestricted_key_is_not_hardware_even_if_enrolled() -> None:
    refused(judge(recorded_parts("unrestricted")), "the attestation key is not restricted")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        (0x00050070, "not fixedTPM"),
        (0x00050062, "not fixedParent"),
        (0x00050052, "not sensitiveDataOrigin"),
        (0x00040072, "not restricted"),
        (0x00010072, "not sign"),
        (0x00070072, "is decrypt, and must not be"),
        (0x00050872, "is encryptedDuplication, and must not be"),
    ],
)
def test_a_key_that_could_leave_or_lie_is_not_hardware(attributes: int, reason: str) -> None:
    tpm = LyingTpm(attributes)
    refused(judge(tpm.quote(qualifying_data(OCCASION, CLAIMS), [ZERO] * 3)), reason)


def test_a_statement_in_the_right_form_is_hardware_so_that_the_wrong_ones_below_mean_something() -> None:
    verdict = judge(LyingTpm().quote(qualifying_data(OCCASION, CLAIMS), [ZERO] * 3))
    assert verdict.level is Level.HARDWARE, verdict.reasons


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"magic": 0xFF544348}, "its magic is another"),
        ({"kind": 0x8017}, "type 0x8017"),
        ({"signer": b"\0\x0b" + bytes(32)}, "names another signer"),
        ({"signer": bytes(69)}, "the limit is 68"),
        ({"selection": bytes.fromhex("00000001000b03810000")}, "registers 0,7, expected 0,7,16"),
        ({"selection": bytes.fromhex("00000001000b03810003")}, "registers 0,7,16,17, expected 0,7,16"),
        ({"selection": bytes.fromhex("000000010004" + "03810001")}, "bank 0x4"),
        ({"selection": bytes.fromhex("00000002" + 2 * "000b03810001")}, "other banks"),
        ({"selection": bytes.fromhex("00000000")}, "other banks"),
        ({"selection": bytes.fromhex("00000001000b0481000101")}, "register from 24 on"),
        ({"selection": bytes.fromhex("00000001000b028100")}, "selection's size 0x2"),
        ({"tail": b"\0"}, "followed by 1 other bytes"),
    ],
)
def test_a_well_signed_statement_of_another_form_is_not_hardware(
    changes: dict[str, object], reason: str
) -> None:
    parts = LyingTpm().quote(qualifying_data(OCCASION, CLAIMS), [ZERO] * 3, **changes)  # type: ignore[arg-type]
    refused(judge(parts), reason)


def test_a_tampered_quote_is_not_hardware() -> None:
    parts = recorded_parts("ecc")
    parts[1] = parts[1][:-1] + bytes([parts[1][-1] ^ 1])
    refused(judge(parts), "signature does not verify")


def test_a_machine_that_booted_otherwise_is_not_hardware() -> None:
    accepted = recorded_parts("ecc")[5]
    now = recorded_parts("after_another_boot")
    verdict = judge(now, Policy(pcrs=(PcrRule(16, (accepted,)),)))
    refused(verdict, f"register 16 is {now[5].hex()}, which the policy does not accept")


def test_register_values_that_are_not_those_quoted_are_not_hardware() -> None:
    accepted, now = recorded_parts("ecc"), recorded_parts("after_another_boot")
    refused(judge([*now[:5], accepted[5]]), "not those in the quote")
    refused(judge(now[:5]), "2 register values came, expected 3")
    refused(judge(now[:2]), "came in 2 parts")


def test_a_policy_that_requires_rules_gives_no_hardware_without_them() -> None:
    policy = Policy(require_pcrs=True, pcrs=(PcrRule(16, (ZERO,), ("gamma",)),))
    refused(judge(recorded_parts("ecc"), policy), "has none for beta")


def test_what_is_asked_for_is_what_the_rules_need() -> None:
    policy = Policy(
        pcrs=(PcrRule(7, (ZERO,)), PcrRule(4, (ZERO,), ("beta",)), PcrRule(9, (ZERO,), ("gamma",)))
    )
    assert asked_registers(policy, "beta") == [4, 7]
    assert asked_registers(Policy(), "beta") == list(range(8))


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        (SoftwareRule("package", ("cd" * 32,)), "its package is " + "ab" * 32),
        (SoftwareRule("torch", ("2.11.0", "2.12.0")), "torch is 2.13.0, expected 2.11.0 or 2.12.0"),
        (SoftwareRule("transformers", ("5.17",)), "transformers is unknown, expected 5.17"),
    ],
)
def test_drift_is_none_however_good_the_hardware(rule: SoftwareRule, reason: str) -> None:
    refused(judge(recorded_parts("ecc"), Policy(software=(rule,))), reason, Level.NONE)


def test_same_means_the_same_as_the_verifiers_own() -> None:
    policy = Policy(software=(SoftwareRule("package", ()), SoftwareRule("platform", ())))
    parts = recorded_parts("ecc")
    assert judge(parts, policy).level is Level.HARDWARE
    own = msgspec.structs.replace(decode_claims(CLAIMS), platform="Darwin")
    verdict = appraise(evidence(parts), policy, context(enrolled(parts), own=own))
    refused(verdict, "platform is Linux test, expected Darwin", Level.NONE)


def test_a_model_is_asked_for_once_a_stage_is_held() -> None:
    parts = recorded_parts("ecc")
    policy = Policy(software=(SoftwareRule("model", ("ef" * 32,)),))
    assert judge(parts, policy).level is Level.HARDWARE
    verdict = appraise(evidence(parts), policy, context(enrolled(parts), holds_stage=True))
    refused(verdict, "model is unknown", Level.NONE)


def test_a_verifier_without_a_model_has_nothing_to_compare_a_model_with() -> None:
    policy = Policy(software=(SoftwareRule("model", ()),))
    claims = encode_claims(msgspec.structs.replace(decode_claims(CLAIMS), model="ef" * 32))
    sent = evidence([], claims=claims, kind="")
    assert appraise(sent, policy, context(b"")).level is Level.SELF_SIGNED
    own = msgspec.structs.replace(decode_claims(CLAIMS), model="dd" * 32)
    refused(appraise(sent, policy, context(b"", own=own)), "its model is efef", Level.NONE)


def test_a_cluster_is_as_good_as_its_weakest_member() -> None:
    assert weakest([Level.HARDWARE, Level.SELF_SIGNED]) is Level.SELF_SIGNED
    assert weakest([]) is Level.NONE
    assert [level.text for level in sorted(Level)] == ["none", "self_signed", "hardware"]


@given(st.integers(0, 5), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_a_part_cut_at_any_boundary_or_with_bytes_behind_it_is_not_hardware(
    index: int, data: st.DataObject
) -> None:
    parts = recorded_parts(data.draw(st.sampled_from(["ecc", "rsa"])))
    key = enrolled(parts)
    part = parts[index]
    end = data.draw(st.integers(0, len(part) - 1))
    parts[index] = (
        part[:end] if data.draw(st.booleans()) else part + data.draw(st.binary(min_size=1, max_size=2000))
    )
    verdict = judge(parts, key=key)
    assert verdict.level is Level.SELF_SIGNED
    assert verdict.reasons


@given(st.integers(0, 5), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_no_flipped_bit_of_a_statement_is_hardware(index: int, data: st.DataObject) -> None:
    parts = recorded_parts("ecc")
    key = enrolled(parts)
    part = bytearray(parts[index])
    bit = data.draw(st.integers(0, len(part) * 8 - 1))
    part[bit // 8] ^= 1 << bit % 8
    parts[index] = bytes(part)
    assert judge(parts, key=key).level is Level.SELF_SIGNED


@given(st.lists(st.binary(max_size=300), max_size=32), st.text(max_size=32), st.binary(max_size=300))
@settings(max_examples=examples(200), deadline=None)
def test_garbage_never_raises_and_never_counts(parts: list[bytes], kind: str, claims: bytes) -> None:
    sent = evidence(parts, kind=kind, claims=claims)
    assert appraise(sent, Policy(), context(enrolled(recorded_parts("ecc")))).level is Level.NONE
    sent = evidence(parts, kind=kind)
    assert appraise(sent, Policy(), context(enrolled(recorded_parts("ecc")))).level is Level.SELF_SIGNED


def test_claims_are_the_same_bytes_each_time() -> None:
    claims = Claims("", {"b": "2", "a": "1"}, "", "", [])
    again = Claims("", {"a": "1", "b": "2"}, "", "", [])
    assert encode_claims(claims) == encode_claims(again)
