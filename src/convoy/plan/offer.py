"""The resources that one member, or the ranks of one stage together, offer to a plan."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.config.kernels import held_form
from convoy.trust.evidence.level import Level


@dataclass(frozen=True)
class MemberOffer:
    """Hold one member's resources. Offers come in roster order.

    ``level`` is the member's proved level; it is none if no proof was checked. With ``ranks``, the offer is
    that of several members that hold one stage together, each its slice: rank 0, which gives the name, and
    the others (`plan.placement.grouping`).
    """

    name: str
    # For weights and K/V; of ranks, the smallest rank's.
    memory_bytes: int
    head: bool = False
    level: Level = Level.NONE
    # Threads that compute; 0 if unknown.
    num_threads: int = 0
    # A word of `config.kernels.FORMS`.
    kernel: str = "float32"
    ranks: tuple[MemberOffer, ...] = ()
    # Without compiled code it unpacks the forms of files; of ranks, any of them.
    unpacks: bool = False

    @property
    def form(self) -> str:
        """Return the word of the form of its weights and K/V."""
        return held_form(self.kernel, unpacks=self.unpacks)

    @property
    def each(self) -> tuple[MemberOffer, ...]:
        """Return the members one by one, in the order of their ranks."""
        return self.ranks or (self,)

    @property
    def world_size(self) -> int:
        return len(self.each)

    @property
    def label(self) -> str:
        """Return ``alpha``, or ``alpha+beta``."""
        return "+".join(member.name for member in self.each)

    @property
    def share_bytes(self) -> int:
        """Return the weight for sharing out layers: the smallest rank bounds the memory of the others."""
        return self.memory_bytes * self.world_size
