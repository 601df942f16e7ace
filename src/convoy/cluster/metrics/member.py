"""The metrics of a member, head or peer: its links, its stage, its place in the plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from convoy.cluster.metrics.engine import engine_families
from convoy.cluster.metrics.families import Metric, build_info, counter, gauge, histogram
from convoy.cluster.peer.peer import Peer
from convoy.cluster.running import RunningCluster
from convoy.cluster.traffic import PeerTraffic


def head_families(cluster: RunningCluster, model: str) -> Iterator[Metric]:
    """Yield the metrics of a head at this moment, with the name of its ``model`` in the APIs.

    It asks no peer, so a scrape never waits for one.
    """
    head, active = cluster.head, cluster.head.active_plan
    assert active is not None, "a running cluster has a plan"
    plan, stats = active.plan, cluster.engine.stats()
    yield from engine_families(model, plan.block_size, stats)
    yield build_info("head")
    ready, _ = cluster.health()
    yield gauge("convoy_ready", "1 if a token passed every stage lately.", [({}, int(ready))])
    yield gauge("convoy_plan_generation", "Generation of the plan; it grows.", [({}, plan.plan_id)])
    yield gauge("convoy_roster_epoch", "Epoch of the roster.", [({}, head.roster.epoch)])
    here, members = {head.name, *head.peers.present()}, [one.name for one in head.roster.members]
    up = [({"member": name}, int(name in here)) for name in members]
    yield gauge("convoy_member_up", "1 for each listed member that is connected.", up)
    holders = set() if cluster.asleep else active.members
    holds = [({"member": name}, int(name in holders)) for name in members]
    yield gauge("convoy_member_in_plan", "1 for each member that holds a part of the model.", holds)
    yield from link_families(head.peers.traffic.by_peer())


def peer_families(peer: Peer) -> Iterator[Metric]:
    """Yield the metrics of a peer at this moment."""
    yield build_info("peer")
    facts = peer.facts()
    for name, text, value in (
        ("convoy_head_up", "1 while a head has greeted this member.", facts.has_head),
        ("convoy_ready", "1 while a plan is active here.", facts.is_active),
        ("convoy_roster_epoch", "Epoch of the roster.", facts.epoch),
        ("convoy_plan_generation", "Generation of the plan here; 0 for none.", facts.plan_id),
        ("convoy_stage_layers", "Layers that are loaded here.", facts.num_layers),
        ("convoy_stage_weight_bytes", "Bytes of their weights.", facts.weight_bytes),
    ):
        yield gauge(name, text, [({}, value)])
    text = "Seconds of this member's part of a step, from its last input to its sent result."
    yield histogram("convoy_stage_step_seconds", text, [({}, peer.step_s.snapshot())])
    yield from link_families(peer.traffic.by_peer())


def link_families(traffic: Mapping[str, PeerTraffic]) -> Iterator[Metric]:
    """Yield the traffic with every member that there was a link with."""
    by = sorted(traffic.items())
    both = ("sent", "received")
    sealed = [
        ({"member": name, "direction": way}, getattr(one, f"{way}_bytes")) for name, one in by for way in both
    ]
    yield counter("convoy_link_sealed_bytes", "Bytes in sealed frames, by the other member.", sealed)
    hops = [
        ({"member": name, "direction": way}, getattr(one, f"{way}_hops")) for name, one in by for way in both
    ]
    yield counter("convoy_hops", "Hidden states over a link.", hops)
    broken = [({"member": name}, one.broken) for name, one in by]
    yield counter("convoy_links_lost", "Links that broke, or that the other end closed.", broken)
