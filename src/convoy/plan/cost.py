"""What a stage costs in time, so that between equal members none waits for another.

Both what a decode reads and what a prefill multiplies grow with the weights that a token passes through, so
a stage's time is taken to be proportional to their number: its layers', and `lm_head`'s where the output is.
The embedding is looked up, a row for each token, and counts for nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from convoy.plan.offer import MemberOffer
from convoy.plan.spec import ModelSpec

_ALIKE = 0.9  # free memory differs a little between machines that are the same


def equals(members: Sequence[MemberOffer]) -> bool:
    """Whether members may be taken for equally fast: as many threads, and memory within a tenth."""
    memory_bytes = [member.memory_bytes for member in members]
    same_threads = len({member.num_threads for member in members}) == 1
    return same_threads and min(memory_bytes) >= _ALIKE * max(memory_bytes)


def stage_cost(spec: ModelSpec, start: int, end: int, *, output: bool) -> int:
    """Weight elements that a token passes through in layers [start, end), and in the output if owned."""
    return sum(spec.layer_elements[start:end]) + (output_cost(spec) if output else 0)


def output_cost(spec: ModelSpec) -> int:
    """Elements of the final norm and `lm_head`."""
    return (spec.vocab_size + 1) * spec.hidden_size


def attention_slope(spec: ModelSpec) -> float:
    """What one key costs a token's attention, relative to all else that the token costs, over all layers."""
    per_key = 2 * spec.num_heads * spec.head_dim * spec.num_layers  # q.k and p.v, in multiplications
    return per_key / max(1, sum(spec.layer_elements))


def balanced(costs: Sequence[int], extras: Sequence[int]) -> list[int]:
    """How many of the layers that cost ``costs`` each stage gets, at least one, in order.

    ``extras`` is what each stage costs beside its layers; there are at least as many layers as stages. The
    dearest stage is as cheap as can be, and among those cuts the stages are as level as can be (least
    squares): the linear partition problem, by dynamic programming twice.
    """
    reach = [0, *itertools.accumulate(costs)]
    return _level(reach, extras, _cheapest_limit(reach, extras))


def _cheapest_limit(reach: Sequence[int], extras: Sequence[int]) -> int:
    """The cost of the dearest stage under the best cuts."""
    best: dict[int, int] = {0: 0}
    for index, extra in enumerate(extras):
        following: dict[int, int] = {}
        for end in range(index + 1, len(reach)):
            found = reach[-1] + max(extras) + 1
            for start in range(end - 1, index - 1, -1):
                cost = reach[end] - reach[start] + extra
                if cost >= found:
                    break  # and dearer with every layer more
                if start in best:
                    found = min(found, max(cost, best[start]))
            following[end] = found
        best = following
    return best[len(reach) - 1]


def _level(reach: Sequence[int], extras: Sequence[int], limit: int) -> list[int]:
    """The cuts with the least sum of squared costs among those where no stage costs more than ``limit``."""
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
