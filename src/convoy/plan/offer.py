"""What one member brings to a plan, or some that hold a stage together."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.trust.evidence.level import Level


@dataclass(frozen=True)
class MemberOffer:
    """Offers come in roster order. ``level`` is what was proved of the member, none where nobody looked.

    With ``ranks`` it is the offer of some who hold one stage together, each its slice: of rank 0, whose name
    it has, and the others (`plan.placement.grouping`).
    """

    name: str
    memory_bytes: int  # for weights and K/V; of ranks the smallest one's
    head: bool = False
    level: Level = Level.NONE
    num_threads: int = 0  # that compute; 0: not known
    kernel: str = "float32"  # in which form it holds weights and K/V, see `plan.spec.kernels`
    ranks: tuple[MemberOffer, ...] = ()

    @property
    def each(self) -> tuple[MemberOffer, ...]:
        """The members one by one, in the order of their ranks."""
        return self.ranks or (self,)

    @property
    def world_size(self) -> int:
        return len(self.each)

    @property
    def label(self) -> str:
        """``alpha``, or ``alpha+beta``."""
        return "+".join(member.name for member in self.each)

    @property
    def share_bytes(self) -> int:
        """What layers are shared out by: the smallest rank bounds what the others can use."""
        return self.memory_bytes * self.world_size
