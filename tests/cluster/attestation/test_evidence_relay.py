"""A head has its peers prove themselves to others: over real sealed links, for this head and no other."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from convoy.cluster.attestation.evidence_maker import EvidenceMaker
from convoy.cluster.attestation.evidence_relay import EvidenceRelay
from convoy.cluster.handlers import HandlerTable, on
from convoy.testing.links import memory_link_pair
from convoy.transport.link.link import Link, Received
from convoy.transport.member import LocalMember
from convoy.trust.evidence.evidence import Occasion, provider_binding
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import Policy
from convoy.trust.evidence.verify import VerificationContext, appraise
from convoy.wire.frame import frames_from
from convoy.wire.messages.claims import Claims
from convoy.wire.messages.control import FrameType, Sender
from convoy.wire.messages.evidence import Evidence, Vouch, Vouched
from support.members import make_local_members

CLAIMS = Claims("ab" * 32, {"convoy": "0.1.0"}, "here", "", [])
PURPOSE = b"p" * 32


class Side:
    def __init__(self, me: LocalMember, link: Link) -> None:
        self.me, self.link = me, link
        self.relay = EvidenceRelay(lambda: me, EvidenceMaker(None, CLAIMS))
        self.handlers = HandlerTable(
            [on(Vouch, self.relay.handle_vouch), on(Vouched, self.relay.handle_vouched)]
        )
        self.silent = False

    def deliver(self, link: Link, received: Received) -> None:
        if not self.silent:
            self.handlers.handle(link, received)

    def ended(self, link: Link, _error: object) -> None:
        self.relay.detach(link)


@contextmanager
def head_and_peer() -> Iterator[tuple[Side, Side]]:
    members = make_local_members(("alpha", "beta"))
    links = memory_link_pair(members[0], members[1])
    alpha, beta = Side(members[0], links[0]), Side(members[1], links[1])
    links[0].start(alpha.deliver, alpha.ended, frames_from(Sender.PEER))
    links[1].start(beta.deliver, beta.ended, frames_from(Sender.HEAD))
    try:
        yield alpha, beta
    finally:
        for one in (alpha, beta):
            one.relay.close()
            one.link.close()


def level(of: LocalMember, vouched: Vouched, provider: bytes, purpose: bytes = PURPOSE) -> Level:
    evidence = Evidence(vouched.claims, vouched.signature, vouched.kind, vouched.parts)
    occasion = Occasion(provider_binding(provider), purpose, of.identity.public_key)
    return appraise(evidence, Policy(), VerificationContext(of.name, b"", occasion, [0, 7], CLAIMS)).level


def test_a_peer_proves_itself_for_its_head_and_this_purpose_alone() -> None:
    with head_and_peer() as (alpha, beta):
        found = alpha.relay.gather([alpha.link], PURPOSE, [0, 7], 10.0)
        assert list(found) == ["beta"]
        head = alpha.me.identity.public_key
        assert level(beta.me, found["beta"], head) is Level.SELF_SIGNED
        assert level(beta.me, found["beta"], beta.me.identity.public_key) is Level.NONE, "another provider"
        assert level(beta.me, found["beta"], head, secrets.token_bytes(32)) is Level.NONE, "another purpose"
        assert level(alpha.me, alpha.relay.own(PURPOSE, [0, 7]), head) is Level.SELF_SIGNED


def test_a_peer_that_says_nothing_keeps_nobody_longer_than_the_deadline() -> None:
    with head_and_peer() as (alpha, beta):
        beta.silent = True
        assert alpha.relay.gather([alpha.link], PURPOSE, [], 0.05) == {}
        beta.silent = False
        assert list(alpha.relay.gather([alpha.link], PURPOSE, [], 10.0)) == ["beta"]


def test_evidence_for_another_purpose_than_was_asked_is_of_no_effect() -> None:
    with head_and_peer() as (alpha, beta):
        beta.silent = True
        late = beta.relay.own(b"q" * 32, [])
        alpha.relay.handle_vouched(alpha.link, late)
        assert alpha.relay.gather([alpha.link], PURPOSE, [], 0.05) == {}


def test_a_peer_asks_its_head_for_nothing() -> None:
    assert FrameType.VOUCH not in frames_from(Sender.PEER)
    assert FrameType.VOUCHED not in frames_from(Sender.HEAD)
