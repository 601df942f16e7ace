"""The time of a stage, so that between equal members none waits for another.

Both a decode's reads and a prefill's products grow with the weights that a token passes through. So a stage's
time is taken to be proportional to their number: those of its layers, and `lm_head` at the output's owner. Of
experts, only those that a token goes to count. Tables read by row, one row for each token, count for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from convoy.plan.offer import MemberOffer
from convoy.plan.spec.model import ModelSpec

# Tokens that attention runs together: a smaller chunk costs as much.
TILE = 16
# Free memory differs a little between machines that are the same.
_ALIKE = 0.9


def equals(members: Sequence[MemberOffer]) -> bool:
    """Return whether members count as equally fast: the same number of threads, and memory within a tenth."""
    memory_bytes = [member.memory_bytes for member in members]
    alike = len({(member.num_threads, member.world_size) for member in members}) == 1
    return alike and min(memory_bytes) >= _ALIKE * max(memory_bytes)


def layer_costs(spec: ModelSpec) -> list[int]:
    """Return the cost of each layer. A token passes few of the experts, though all of them lie in memory."""
    return [round(layer.used_elements(spec.experts_per_token)) for layer in spec.layers]


def output_cost(spec: ModelSpec) -> int:
    """Return the elements of the final norm and `lm_head`, and of the weights that join streams."""
    return (spec.vocab_size + 1) * spec.hidden_size + spec.joining_elements


@dataclass(frozen=True)
class TokenCost:
    """Compute a token's cost at a position: 1 for its weights, plus a share for each key it sees.

    ``slopes`` has, for each kind of layer, the cost of one key over those layers, and their window (None: all
    keys).
    """

    slopes: tuple[tuple[float, int | None], ...]

    @classmethod
    def of(cls, spec: ModelSpec) -> TokenCost:
        """Return the costs in multiplications: q.k and p.v for each key, and one for each weight."""
        weights = max(1, sum(layer_costs(spec)))
        per_key = ((g, g.num_heads * (g.head_dim + g.value_dim) / weights) for g in spec.cache_groups)
        return cls(tuple((cost * len(g.layers) / g.stride, g.window) for g, cost in per_key if g.has_keys))

    def of_chunk(self, start: int, num_tokens: int) -> float:
        """Return the cost of ``num_tokens`` from position ``start``, in tokens without attention."""
        keys = start + num_tokens / 2
        seen = sum(slope * (keys if window is None else min(keys, window)) for slope, window in self.slopes)
        return num_tokens * (1 + seen)

    def level_chunk(self, start: int, most: int) -> int:
        """Return the largest chunk from ``start`` that costs no more than ``most`` tokens from 0.

        It is a multiple of 16, and at least 16, or ``most`` if that is less.
        """
        limit = self.of_chunk(0, most)
        if self.of_chunk(start, most) <= limit:
            return most
        fitting = (
            n for n in range((most - 1) // TILE * TILE, TILE, -TILE) if self.of_chunk(start, n) <= limit
        )
        return next(fitting, min(TILE, most))


def balanced(costs: Sequence[int], extras: Sequence[int]) -> list[int]:
    """Return how many of the layers with these ``costs`` each stage gets, at least one, in order.

    ``extras`` is each stage's cost beside its layers; there are at least as many layers as stages. The
    dearest stage is as cheap as possible, and among those cuts the stages are as level as possible (least
    squares). This is the linear partition problem, solved by dynamic programming twice.
    """
    reach = [0, *itertools.accumulate(costs)]
    return _level(reach, extras, _cheapest_limit(reach, extras))


def _cheapest_limit(reach: Sequence[int], extras: Sequence[int]) -> int:
    """Return the cost of the dearest stage under the best cuts."""
    best: dict[int, int] = {0: 0}
    for index, extra in enumerate(extras):
        following: dict[int, int] = {}
        for end in range(index + 1, len(reach)):
            found = reach[-1] + max(extras) + 1
            for start in range(end - 1, index - 1, -1):
                cost = reach[end] - reach[start] + extra
                if cost >= found:
                    # Each further layer makes the stage dearer.
                    break
                if start in best:
                    found = min(found, max(cost, best[start]))
            following[end] = found
        best = following
    return best[len(reach) - 1]


def _level(reach: Sequence[int], extras: Sequence[int], limit: int) -> list[int]:
    """Return the cuts with the least sum of squared costs in which no stage costs more than ``limit``."""
    best: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for index, extra in enumerate(extras):
        following: dict[int, tuple[int, list[int]]] = {}
        for end in range(index + 1, len(reach)):
            for start in range(end - 1, index - 1, -1):
                cost = reach[end] - reach[start] + extra
                if cost > limit:
                    break
                if start in best:
                    squares, counts = best[start]
                    way = (squares + cost**2, [*counts, end - start])
                    following[end] = min(way, following.get(end, way))
        best = following
    return best[len(reach) - 1][1]
