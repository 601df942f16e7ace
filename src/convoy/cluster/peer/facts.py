"""What a peer is at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.cluster.peer.loaded_plan import LoadedPlan


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """``generation``: of the plan that is loaded; 0 for none."""

    has_head: bool
    is_active: bool
    epoch: int
    generation: int
    num_layers: int
    weight_bytes: int


def facts_of(loaded: LoadedPlan | None, *, has_head: bool, epoch: int) -> PeerFacts:
    """``loaded``: the plan that is there, active or not."""
    if loaded is None:
        return PeerFacts(has_head, False, epoch, 0, 0, 0)
    own = loaded.assignment
    generation, num_layers = loaded.plan.generation, own.end - own.start
    return PeerFacts(has_head, loaded.is_active, epoch, generation, num_layers, loaded.stage.weight_bytes)
