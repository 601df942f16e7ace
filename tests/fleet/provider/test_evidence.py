"""Evidence of providers and their members, on real sockets: to the coordinator, and through it to a proxy."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from websockets.sync.client import connect

from convoy.cluster.attestation.evidence_maker import EvidenceMaker
from convoy.cluster.attestation.evidence_relay import EvidenceRelay
from convoy.cluster.handlers import HandlerTable, on
from convoy.cluster.head.provider_evidence import GatheredEvidence, HeadEvidence, OwnProcess
from convoy.crypto.identity import Identity
from convoy.crypto.sealed.request import RequestKey
from convoy.errors import ConvoyError
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.proxy.trust import Trust
from convoy.testing.links import memory_link_pair
from convoy.transport.link.link import Link, Received
from convoy.transport.member import LocalMember
from convoy.trust.evidence.evidence import provider_purpose
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import Policy, SoftwareRule
from convoy.trust.evidence.provider import ProviderRules
from convoy.wire.fleet.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    Offer,
    ProviderChallenge,
    ProviderHello,
    Refused,
    Register,
    decode_from_coordinator,
    encode_fleet,
    registration_bytes,
)
from convoy.wire.fleet.provider_evidence import ProviderEvidence, sign_provider_evidence
from convoy.wire.frame import frames_from
from convoy.wire.messages.claims import Claims
from convoy.wire.messages.control import Sender
from convoy.wire.messages.evidence import Vouch, Vouched
from support.fleet import MODEL, FakeEngine, FleetUnderTest, engine_server, question
from support.members import OPERATOR, make_local_members, membership_of
from support.proxy import HostileCoordinator, hostile_server, proxy
from support.tpm_vectors import LyingTpm
from support.waiting import wait_until

CLAIMS = Claims("ab" * 32, {"convoy": "0.1.0"}, "here", "", [])
DRIFTED = msgspec.structs.replace(CLAIMS, package="cd" * 32)
PACKAGE = Policy(software=(SoftwareRule("package", ("ab" * 32,)),))
AT_LEAST = ProviderRules(
    minimum=Level.SELF_SIGNED, policy=PACKAGE, operators=frozenset({OPERATOR.public_key})
)
# Challenges come often. A provider that is late with some of them on a busy machine stays.
OPTIONS = CoordinatorOptions(
    instance="test", prove_every_s=0.2, max_failed_proofs=1000, greeting_s=60.0, trust=AT_LEAST
)


def own(identity: Identity, claims: Claims = CLAIMS) -> OwnProcess:
    return OwnProcess(identity, EvidenceMaker(None, claims))


@dataclass
class Drifts:
    """Say one thing, and another once it has drifted."""

    identity: Identity
    claims: Claims = CLAIMS
    asked: list[bytes] = field(default_factory=list)

    def gather(self, purpose: bytes, registers: Sequence[int]) -> GatheredEvidence:
        self.asked.append(purpose)
        return own(self.identity, self.claims).gather(purpose, registers)


class SoftTpm:
    kind = "tpm2"

    def statement(self, _me: LocalMember, qualifying: bytes, registers: Sequence[int]) -> list[bytes]:
        bits = sum(1 << index for index in registers).to_bytes(3, "little")
        selection = bytes.fromhex("00000001000b03") + bits
        return LyingTpm().quote(qualifying, [bytes(32)] * len(registers), selection=selection)


@pytest.fixture(scope="module")
def engine_url() -> Iterator[str]:
    with engine_server(FakeEngine()) as url:
        yield url


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path_factory.mktemp("fleet"), OPTIONS)
    yield made
    made.close()


def listed(fleet: FleetUnderTest, name: str) -> dict[str, Any]:
    with fleet.admin() as admin:
        found: list[dict[str, Any]] = admin.get("/status").json()["providers"]
    return next((one for one in found if one["name"] == name), {})


def answer(url: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json=question(20, 22), timeout=30, trust_env=False)


def registered_with(fleet: FleetUnderTest, name: str, evidence: Callable[..., bytes]) -> str:
    """Return the refusal for the result of ``evidence``, made of identity, challenge, key and expiry."""
    identity, key, expires_s = Identity.generate(), RequestKey(), int(time.time()) + 3600
    fleet.directory.approve(identity.public_key, name)
    url = fleet.url.replace("http", "ws", 1) + "/provider"
    with connect(url, max_size=MAX_MESSAGE_BYTES, compression=None) as socket:

        def receive() -> object:
            data = socket.recv(timeout=60)
            assert isinstance(data, bytes)
            return decode_from_coordinator(data, MAX_MESSAGE_BYTES)

        authority = f"127.0.0.1:{fleet.port}"
        socket.send(encode_fleet(ProviderHello(PROTOCOL, bytes(32), authority, tls=False, pinned=False)))
        challenge = receive()
        assert isinstance(challenge, ProviderChallenge)
        assert set(range(8)) <= set(challenge.registers)
        register = Register(
            identity=identity.public_key,
            request_key=key.public,
            request_key_expires_s=expires_s,
            key_signature=bytes(64),
            certificate=b"",
            software="raw",
            offers=[Offer(MODEL, 4, 10.0, 20.0, 100.0, 4096)],
            signature=bytes(64),
            evidence=evidence(identity, challenge, key.public, expires_s),
        )
        said = registration_bytes(challenge, authority, register)
        socket.send(encode_fleet(msgspec.structs.replace(register, signature=identity.sign(said))))
        refused = receive()
        assert isinstance(refused, Refused)
        return refused.reason


def shown(
    identity: Identity,
    challenge: ProviderChallenge,
    key: bytes,
    expires_s: int,
    *,
    signer: Identity | None = None,
) -> bytes:
    purpose = provider_purpose(challenge.coordinator, challenge.nonce, key, expires_s)
    found = own(identity).gather(purpose, challenge.registers)
    made = ProviderEvidence(challenge.coordinator, challenge.nonce, challenge.registers, b"", found.members)
    return sign_provider_evidence(made, key, expires_s, (signer or identity).sign)


def test_a_provider_without_evidence_is_refused_where_a_level_is_wanted(fleet: FleetUnderTest) -> None:
    reason = registered_with(fleet, "silent", lambda *_: b"")
    assert reason == (
        "the provider has level none, and the least that is taken here is self_signed: it sent no evidence"
    )


def test_evidence_that_is_replayed_foreign_or_rubbish_is_refused_with_its_own_reason(
    fleet: FleetUnderTest,
) -> None:
    def replayed(identity: Identity, challenge: ProviderChallenge, *key: Any) -> bytes:
        return shown(identity, msgspec.structs.replace(challenge, nonce=b"o" * 32), *key)

    def stolen(_: Identity, challenge: ProviderChallenge, *key: Any) -> bytes:
        return shown(Identity.generate(), challenge, *key)

    def relabelled(identity: Identity, challenge: ProviderChallenge, *key: Any) -> bytes:
        return shown(Identity.generate(), challenge, *key, signer=identity)

    assert "another challenge" in registered_with(fleet, "replays", replayed)
    assert "not signed by this provider" in registered_with(fleet, "steals", stolen)
    assert "lacks the provider's own" in registered_with(fleet, "relabels", relabelled)
    assert "are no evidence" in registered_with(fleet, "babbles", lambda *_: b"rubbish")


def test_a_provider_that_drifts_is_out_at_the_next_challenge_and_hears_why(
    fleet: FleetUnderTest, engine_url: str
) -> None:
    identity = Identity.generate()
    witness = Drifts(identity)
    fleet.add("drifts", engine_url, identity=identity, evidence_source=witness)
    assert listed(fleet, "drifts")["level"] == "self_signed"
    wait_until(lambda: len(witness.asked) > 3)  # and each time for another challenge
    assert len(set(witness.asked)) == len(witness.asked)
    assert listed(fleet, "drifts")["level"] == "self_signed"
    witness.claims = DRIFTED
    wait_until(lambda: not listed(fleet, "drifts"))
    wait_until(lambda: any("drifts: the coordinator says" in event for event in fleet.events))
    (reason, *_) = [event for event in fleet.events if "drifts: the coordinator says" in event]
    assert "provider has level none, and the least that is taken here is self_signed" in reason
    assert "says that its package is" in reason
    fleet.stop_provider(-1)


def _to(relay: EvidenceRelay) -> Callable[[Link, Received], None]:
    return HandlerTable([on(Vouch, relay.handle_vouch), on(Vouched, relay.handle_vouched)]).handle


def _from(relay: EvidenceRelay) -> Callable[[Link, ConvoyError], None]:
    def ended(link: Link, _: ConvoyError) -> None:
        relay.detach(link)

    return ended


@contextmanager
def two_members(identity_of: dict[str, Identity], *, hardware: bool) -> Iterator[HeadEvidence]:
    members = make_local_members(("alpha", "beta"))
    if hardware:
        keyed = tuple(replace(one, attestation_key=LyingTpm().key_der) for one in members[0].roster.members)
        roster = replace(members[0].roster, members=keyed)
        members = tuple(LocalMember(one.name, one.identity, roster) for one in members)
    alpha, beta = members
    identity_of["alpha"] = alpha.identity
    links = memory_link_pair(alpha, beta)
    head = EvidenceRelay(lambda: alpha, EvidenceMaker(SoftTpm(), CLAIMS))
    peer = EvidenceRelay(lambda: beta, EvidenceMaker(SoftTpm(), CLAIMS))
    for link, relay, allowed in (
        (links[0], head, frames_from(Sender.PEER)),
        (links[1], peer, frames_from(Sender.HEAD)),
    ):
        link.start(_to(relay), _from(relay), allowed)
    try:
        yield HeadEvidence(membership_of(alpha), head, lambda: [links[0]], 60.0)
    finally:
        for relay, link in zip((head, peer), links, strict=True):
            relay.close()
            link.close()


@pytest.mark.parametrize("level", ["self_signed", "hardware"])
def test_each_member_of_a_provider_proves_itself_to_the_coordinator_and_to_the_proxy(
    fleet: FleetUnderTest, engine_url: str, level: str
) -> None:
    identities: dict[str, Identity] = {}
    name = f"pair-{level}"
    with two_members(identities, hardware=level == "hardware") as witness:
        fleet.add(name, engine_url, identity=identities["alpha"], evidence_source=witness)
        found = listed(fleet, name)
        assert (found["level"], found["members"]) == (level, {"alpha": level, "beta": level})
        with fleet.client() as client:
            assert client.get("/v1/models").json()["data"][0]["levels"] == {level: 1}
        rules = replace(AT_LEAST, minimum=Level.from_text(level), every_member=True)
        trust = Trust(frozenset({identities["alpha"].public_key}), rules=rules)
        with proxy(fleet.url, fleet.key, trust) as url:
            said = answer(url)
            assert said.status_code == 200, said.text
            assert said.headers["x-convoy-provider-level"] == level
        fleet.stop_provider(-1)


@pytest.fixture(scope="module")
def lenient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FleetUnderTest]:
    made = FleetUnderTest(tmp_path_factory.mktemp("lenient"), CoordinatorOptions(instance="test"))
    yield made
    made.close()


def refusal(url: str) -> str:
    said = answer(url)
    assert said.status_code == 503
    text: str = said.json()["error"]["message"]
    return text


@pytest.mark.long
def test_a_proxy_judges_by_its_own_rules_and_fails_closed(
    lenient: FleetUnderTest, engine_url: str, tmp_path: Path
) -> None:
    identity = Identity.generate()
    lenient.add("one", engine_url, identity=identity, evidence_source=own(identity))
    assert listed(lenient, "one")["level"] == "self_signed"
    keys = frozenset({identity.public_key})
    hostile = HostileCoordinator(lenient.url)
    with hostile_server(hostile) as hostile_url:

        def through(rules: ProviderRules, check: Callable[[str], None]) -> None:
            with proxy(hostile_url, lenient.key, Trust(keys, rules=rules)) as url:
                check(url)

        def stripped(url: str) -> None:
            assert answer(url).status_code == 200
            honest = hostile.lease
            hostile.lease = lambda lease: {**lease, "evidence": ""}
            assert "the provider has level none" in refusal(url)
            other = shown(Identity.generate(), ProviderChallenge(1, b"c" * 32, b"n" * 32), b"k" * 1216, 5)
            hostile.lease = lambda lease: {**lease, "evidence": base64.b64encode(other).decode()}
            assert "not signed by this provider for its key for requests" in refusal(url)
            hostile.lease = lambda lease: {**lease, "evidence": "A" * 2_000_000}
            assert answer(url).status_code == 503
            hostile.lease = honest

        through(AT_LEAST, stripped)

        def beneath(url: str) -> None:
            assert "none of 1 providers" in refusal(url) or "no provider may take" in refusal(url)

        through(replace(AT_LEAST, minimum=Level.HARDWARE), beneath)
        drift = Policy(software=(SoftwareRule("package", ("ef" * 32,)),))
        through(
            replace(AT_LEAST, policy=drift), lambda url: _contains(refusal(url), "says that its package is")
        )
        revoked = replace(AT_LEAST, revoked=keys)
        through(revoked, lambda url: _contains(refusal(url), "the key of the provider was revoked here"))


def _contains(text: str, part: str) -> None:
    assert part in text
