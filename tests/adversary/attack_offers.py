"""A member that offers more memory than it has, so that the head gives it the layers of others."""

from __future__ import annotations

import queue
from dataclasses import replace

import msgspec
import pytest

from adversary.attack_member import HELLO, MODEL, NAMED, FalsePeer
from adversary.ledger import Row
from convoy.cluster.options import HeadOptions
from convoy.cluster.running import RunningCluster
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.member import LocalMember
from convoy.trust.evidence.policy import OfferRule, PlacementRule, Policy
from convoy.wire.messages.control import MAX_OFFER_BYTES, Plan
from support.cluster import MEMBER
from support.members import make_local_members, membership_of

CLAIMED = 10**15  # bytes: 1,000,000 GB


class Greedy(FalsePeer):
    """Hold beta with a claim. ``plans`` are those that the head made with it."""

    def __init__(self, network: MemoryNetwork, me: LocalMember, claimed: int) -> None:
        self.plans: queue.SimpleQueue[Plan] = queue.SimpleQueue()
        super().__init__(network, me, {"hello": msgspec.structs.replace(HELLO, memory_bytes=claimed)})

    def _deliver(self, link: Link, received: Received) -> None:
        if isinstance(received, ReceivedMessage) and isinstance(received.message, Plan):
            self.plans.put(received.message)
        super()._deliver(link, received)


def layers_of_beta(claimed: int, policy: Policy, *, wait_s: float = 90.0) -> tuple[int | None, str]:
    """Return how many of the four layers the head gives beta, None without a plan; and how it ended."""
    network = MemoryNetwork()
    alpha, beta = make_local_members(["alpha", "beta"])
    greedy = Greedy(network, beta, claimed)
    options = HeadOptions(
        replace(MEMBER, policy=policy), wait_s=wait_s, load_wait_s=3, step_timeout_s=3, num_blocks=32
    )
    try:
        source = ModelSource.resolve(MODEL)
        RunningCluster.start(membership_of(alpha), source, options, network=network).close()
        ended = "bounded"
    except ConvoyError as error:
        ended = type(error).__name__
    finally:
        greedy.close()
    if greedy.plans.empty():
        return None, ended
    stages = greedy.plans.get().stages
    return sum(stage.end - stage.start for stage in stages if stage.member == "beta"), ended


@pytest.mark.attack("an offer of 1,000,000 GB", layer="inner alone")
def test_an_offer_that_no_machine_could_hold_is_refused_by_name(row: Row) -> None:
    layers, ended = layers_of_beta(CLAIMED, Policy(), wait_s=10.0)
    row.tried(ended)
    assert layers is None
    assert ended in NAMED


@pytest.mark.attack("an offer above the policy's cap", layer="inner alone")
@pytest.mark.parametrize("members", [(), ("beta",)])
def test_an_offer_counts_up_to_the_cap_of_the_policy(row: Row, members: tuple[str, ...]) -> None:
    cap = OfferRule(10**9, members)
    layers, ended = layers_of_beta(MAX_OFFER_BYTES, Policy(offers=(cap,)))
    row.tried(ended)
    assert layers == 1, "a quarter of the head's memory, and a quarter of the layers"


@pytest.mark.attack("an offer against a rule for the first layers", layer="inner alone")
def test_layers_that_a_rule_keeps_on_the_head_stay_there(row: Row) -> None:
    rule = PlacementRule(True, True, 3, 0, None, ("alpha",))
    layers, ended = layers_of_beta(MAX_OFFER_BYTES, Policy(placement=(rule,)))
    row.tried(ended)
    assert layers == 1


@pytest.mark.attack("an offer against a rule for the last layers", layer="inner alone")
def test_a_head_that_cannot_keep_what_a_rule_demands_makes_no_plan(row: Row) -> None:
    rule = PlacementRule(False, False, 0, 2, None, ("alpha",))
    layers, ended = layers_of_beta(MAX_OFFER_BYTES, Policy(placement=(rule,)))
    row.tried(ended)
    assert (layers, ended) == (None, "PlanError")
