"""The state of a peer at one moment, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.cluster.peer.loaded_plan import LoadedPlan


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """Describe a peer at one moment. ``generation`` is that of the loaded plan; 0 means no plan."""

    has_head: bool
    is_active: bool
    epoch: int
    generation: int
    num_layers: int
    weight_bytes: int


def facts_of(loaded: LoadedPlan | None, *, has_head: bool, epoch: int) -> PeerFacts:
    """Return the facts of a peer. ``loaded`` is its loaded plan, active or not; None if it has none."""
    if loaded is None:
        return PeerFacts(has_head, False, epoch, 0, 0, 0)
    own = loaded.assignment
    generation, num_layers = loaded.plan.generation, own.end - own.start
    return PeerFacts(has_head, loaded.is_active, epoch, generation, num_layers, loaded.stage.weight_bytes)
