"""What one member brings to a plan."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.trust.level import Level


@dataclass(frozen=True)
class MemberOffer:
    """Offers come in roster order. ``level`` is what was proved of the member, none where nobody looked."""

    name: str
    memory_bytes: int  # for weights and K/V
    head: bool = False
    level: Level = Level.NONE
    num_threads: int = 0  # that compute; 0: not known
    kernel: str = "float32"  # in which form it holds weights and K/V, see `plan.kernels`
