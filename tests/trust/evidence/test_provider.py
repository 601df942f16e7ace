"""A provider's evidence, judged: levels, and everything around it that is wrong in one way."""

from __future__ import annotations

import datetime
from dataclasses import replace

import msgspec
import pytest

from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import AttestationError
from convoy.transport.member import Roster
from convoy.trust.evidence.evidence import (
    Occasion,
    make_evidence,
    provider_binding,
    provider_purpose,
    qualifying_data,
)
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import PcrRule, Policy, SoftwareRule
from convoy.trust.evidence.provider import (
    Challenged,
    Claimant,
    ProviderRules,
    ProviderVerdict,
    appraise_provider,
)
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster
from convoy.wire.fleet.messages import MAX_EVIDENCE_BYTES
from convoy.wire.fleet.provider_evidence import (
    MAX_MEMBER_BYTES,
    MemberEvidence,
    ProviderEvidence,
    sign_provider_evidence,
)
from convoy.wire.messages.claims import Claims, encode_claims
from support.tpm_vectors import LyingTpm

CLAIMS = Claims("ab" * 32, {"convoy": "0.1.0"}, "here", "", [])
NOW = datetime.datetime.now(datetime.UTC)
OPERATOR = OperatorKey.generate()
NAMES = ("alpha", "beta")
REGISTERS = list(range(8))
NONE = ProviderRules()
HARDWARE = ProviderRules(operators=frozenset({OPERATOR.public_key}))


class Shown:
    """Hold a provider of two members with software TPMs; each field may be wrong before `data` is made."""

    def __init__(self) -> None:
        self.identities = {name: Identity.generate() for name in NAMES}
        self.tpms = {name: LyingTpm() for name in NAMES}
        self.provider = self.identities["alpha"]
        self.claimant = Claimant(self.provider.public_key, b"k" * 1216, 1_900_000_000)
        self.challenged = Challenged(b"c" * 32, b"n" * 32)
        self.for_provider = self.provider.public_key
        self.claims = dict.fromkeys(NAMES, CLAIMS)
        self.shown = list(NAMES)
        self.operator = OPERATOR
        self.enrolled = set(NAMES)
        self.roster = self.make_roster(NAMES)

    def make_roster(self, names: tuple[str, ...], head: str = "alpha") -> Roster:
        others = {name: Identity.generate() for name in names if name not in self.identities}
        members = [
            replace(
                member_of(
                    name,
                    self.identities.get(name) or others[name],
                    ("127.0.0.1", 7000 + index),
                    head=name == head,
                ),
                attestation_key=self.tpms[name].key_der if name in self.enrolled else b"",
            )
            for index, name in enumerate(names)
        ]
        return make_roster("test", members, not_before=NOW - datetime.timedelta(hours=1))

    def member(self, name: str) -> MemberEvidence:
        identity, claims = self.identities[name], encode_claims(self.claims[name])
        asked = (self.challenged.coordinator, self.challenged.nonce)
        purpose = provider_purpose(*asked, self.claimant.request_key, self.claimant.expires_s)
        occasion = Occasion(provider_binding(self.for_provider), purpose, identity.public_key)
        selection = bytes.fromhex("00000001000b03") + b"\xff\0\0"
        parts = self.tpms[name].quote(qualifying_data(occasion, claims), [bytes(32)] * 8, selection=selection)
        made = make_evidence(identity.sign, occasion, claims, ("tpm2", parts))
        return MemberEvidence(name, identity.public_key, claims, made.signature, made.kind, list(made.parts))

    @property
    def said(self) -> ProviderEvidence:
        members = [self.member(name) for name in self.shown]
        asked = (self.challenged.coordinator, self.challenged.nonce)
        return ProviderEvidence(*asked, REGISTERS, sign_roster(self.roster, self.operator), members)

    def data(self, said: ProviderEvidence | None = None) -> bytes:
        key = (self.claimant.request_key, self.claimant.expires_s)
        return sign_provider_evidence(said or self.said, *key, self.provider.sign)

    def judge(self, rules: ProviderRules = NONE, data: bytes | None = None) -> ProviderVerdict:
        return appraise_provider(
            *(self.data() if data is None else data, self.claimant, rules, CLAIMS),
            challenged=self.challenged,
            now=NOW,
        )


@pytest.fixture
def shown() -> Shown:
    return Shown()


def test_a_provider_has_its_weakest_members_level(shown: Shown) -> None:
    assert shown.judge(HARDWARE).level is Level.HARDWARE
    shown.enrolled.discard("beta")
    shown.roster = shown.make_roster(NAMES)
    found = shown.judge(HARDWARE)
    assert found.level is Level.SELF_SIGNED
    assert [one.level for one in found.members] == [Level.HARDWARE, Level.SELF_SIGNED]
    assert found.weakest == "beta"
    assert "no attestation key of beta is enrolled" in found.why


def test_tpms_count_only_under_a_roster_of_a_trusted_operator(shown: Shown) -> None:
    found = shown.judge(NONE)
    assert (found.level, found.roster_of) == (Level.SELF_SIGNED, None)
    assert "no operator that is trusted here" in found.why
    shown.operator = OperatorKey.generate()
    assert shown.judge(HARDWARE).level is Level.SELF_SIGNED


def test_the_policy_of_whoever_verifies_decides(shown: Shown) -> None:
    shown.claims["beta"] = replace_claims(package="cd" * 32)
    same = replace(NONE, policy=Policy(software=(SoftwareRule("package", ()),)))
    found = shown.judge(same)
    assert (found.level, found.weakest) == (Level.NONE, "beta")
    assert "its package is" in found.why
    strict = replace(HARDWARE, policy=Policy(pcrs=(PcrRule(7, (b"\xab" * 32,)),)))
    assert shown.judge(strict).level is Level.SELF_SIGNED


def replace_claims(**changes: str) -> Claims:
    return msgspec.structs.replace(CLAIMS, **changes)


def test_a_level_beneath_the_least_names_the_member_and_both_levels(shown: Shown) -> None:
    shown.enrolled.discard("beta")
    shown.roster = shown.make_roster(NAMES)
    rules = replace(HARDWARE, minimum=Level.HARDWARE)
    with pytest.raises(AttestationError, match=r"beta has level self_signed, and the least .* is hardware"):
        rules.require(shown.judge(rules))
    with pytest.raises(AttestationError, match=r"the provider has level none, .* it sent no evidence"):
        rules.require(shown.judge(rules, b""))


def test_evidence_of_another_provider_proves_nothing(shown: Shown) -> None:
    shown.for_provider = Identity.generate().public_key  # the members vouched for that one
    found = shown.judge(HARDWARE)
    assert found.level is Level.NONE
    assert "not signed by alpha's identity key for this challenge" in found.why
    thief = Identity.generate()
    other = replace(shown.claimant, identity=thief.public_key)
    with pytest.raises(AttestationError, match="not signed by this provider"):
        appraise_provider(Shown().data(), other, NONE, CLAIMS, challenged=None, now=NOW)


def test_members_of_another_provider_cannot_be_shown_as_ones_own(shown: Shown) -> None:
    honest = shown.said
    thief = Shown()
    thief.challenged = shown.challenged
    mixed = msgspec.structs.replace(thief.said, members=[thief.member("alpha"), honest.members[1]])
    found = thief.judge(NONE, thief.data(mixed))
    assert [one.level for one in found.members] == [Level.SELF_SIGNED, Level.NONE]


def test_evidence_for_another_key_for_requests_is_refused(shown: Shown) -> None:
    data = shown.data()
    for other in (
        replace(shown.claimant, request_key=b"x" * 1216),
        replace(shown.claimant, expires_s=shown.claimant.expires_s + 1),
    ):
        with pytest.raises(AttestationError, match="for its key for requests"):
            appraise_provider(data, other, NONE, CLAIMS, challenged=None, now=NOW)


def test_old_evidence_is_refused(shown: Shown) -> None:
    data = shown.data()
    shown.challenged = replace(shown.challenged, nonce=b"m" * 32)
    with pytest.raises(AttestationError, match="another challenge"):
        shown.judge(NONE, data)


def test_old_evidence_under_a_new_challenge_is_none(shown: Shown) -> None:
    old = shown.said.members
    shown.challenged = replace(shown.challenged, nonce=b"m" * 32)
    relabelled = msgspec.structs.replace(shown.said, members=old)
    assert shown.judge(NONE, shown.data(relabelled)).level is Level.NONE


def test_a_provider_must_show_its_own_evidence_and_nobodys_twice(shown: Shown) -> None:
    shown.shown = ["beta"]
    with pytest.raises(AttestationError, match="lacks the provider's own"):
        shown.judge()
    shown.shown = ["alpha", "alpha"]
    with pytest.raises(AttestationError, match="twice"):
        shown.judge()


def test_whom_the_roster_does_not_list_is_refused(shown: Shown) -> None:
    shown.roster = shown.make_roster(("alpha", "gamma"))
    with pytest.raises(AttestationError, match="beta is of no member that the provider's roster lists"):
        shown.judge(HARDWARE)
    shown.roster = shown.make_roster(NAMES, head="beta")
    with pytest.raises(AttestationError, match="does not allow alpha as a head"):
        shown.judge(HARDWARE)


def test_a_member_that_is_hidden_is_named_and_refused_where_all_must_show(shown: Shown) -> None:
    shown.shown = ["alpha"]
    found = shown.judge(HARDWARE)
    assert (found.level, found.absent) == (Level.HARDWARE, ("beta",))
    found = shown.judge(replace(HARDWARE, every_member=True))
    assert (found.level, found.weakest) == (Level.NONE, "beta")
    assert "no evidence came of beta" in found.why
    found = shown.judge(replace(NONE, every_member=True))
    assert found.level is Level.NONE, "nobody says how many there are"


def test_an_expired_roster_is_refused(shown: Shown) -> None:
    data = shown.data()
    late = NOW + datetime.timedelta(days=40)
    with pytest.raises(AttestationError, match=r"of the provider's roster: .* expired"):
        appraise_provider(data, shown.claimant, HARDWARE, CLAIMS, challenged=shown.challenged, now=late)


def test_revoked_keys_of_provider_and_member_are_refused(shown: Shown) -> None:
    for name, who in (("alpha", "the provider"), ("beta", "beta")):
        revoked = replace(NONE, revoked=frozenset({shown.identities[name].public_key}))
        with pytest.raises(AttestationError, match=f"the key of {who} was revoked"):
            shown.judge(revoked)
    revoked = replace(NONE, revoked=frozenset({shown.claimant.identity}))
    with pytest.raises(AttestationError, match="revoked"):
        shown.judge(revoked, b"")


def test_rubbish_and_too_much_of_it_is_refused(shown: Shown) -> None:
    data = shown.data()
    for end in range(0, len(data), 211):
        with pytest.raises(AttestationError):
            shown.judge(NONE, data[:end] or b"\xc1")
    for place in range(0, len(data), 397):
        broken = bytearray(data)
        broken[place] ^= 1
        with pytest.raises(AttestationError):
            shown.judge(NONE, bytes(broken))
    with pytest.raises(AttestationError, match=f"the limit is {MAX_EVIDENCE_BYTES}"):
        shown.judge(NONE, bytes(MAX_EVIDENCE_BYTES + 1))
    big = msgspec.structs.replace(shown.member("beta"), parts=[bytes(4096)] * 4 + [b"x"])
    with pytest.raises(AttestationError, match=f"beta has .* the limit is {MAX_MEMBER_BYTES}"):
        shown.judge(
            NONE, shown.data(msgspec.structs.replace(shown.said, members=[shown.member("alpha"), big]))
        )


def test_more_members_than_anybody_takes_are_refused(shown: Shown) -> None:
    one = shown.member("alpha")
    many = [msgspec.structs.replace(one, name=f"m{index}") for index in range(65)]
    with pytest.raises(AttestationError, match="are no evidence"):
        shown.judge(NONE, shown.data(msgspec.structs.replace(shown.said, members=many)))
