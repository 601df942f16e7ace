"""Ranks that share every layer of a stage: the check that a model can be split, and the size of one rank's
part.

Heads and the widths between two linears are divided evenly. The vocabulary is cut in parts of one size, with
the last one filled up, and so are other tables by token id. Norms, routers and latents are the same on all
ranks. If there are fewer K/V heads than ranks, several ranks have the same head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from convoy.errors import PlanError
from convoy.plan.span import Span
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.weights import LayerWeights, Matrix, WeightPart
from convoy.wire.messages.control import StageAssignment

_OTHER_RANKS = "ask for another number of ranks with --ranks, or hold whole layers: --parallel pipeline"
_PIPELINE = "hold whole layers on each member: --parallel pipeline"

Experts = Literal["auto", "split", "whole"]

_UNFIT_KINDS = {
    "recurrent": "its layers keep recurrent state",
    "entries": "its heads look at compressed entries",
    "pending": "its heads look at compressed entries",
}


@dataclass(frozen=True)
class Shard:
    """Name a rank's part of a stage. ``experts`` are each split over the ranks, or shared out whole.

    With "auto" they are split, so that every rank has as much to do for each token. They are shared out whole
    if their width does not divide by the ranks and their number does.
    """

    rank: int
    world_size: int
    experts: Experts = "auto"


WHOLE = Shard(0, 1)


def check_sharding(spec: ModelSpec, world_size: int, experts: Experts = "auto") -> None:
    """Raise PlanError, with the reason and both numbers, if ``world_size`` ranks cannot share a layer."""
    if world_size < 1:
        raise PlanError(f"a stage of {world_size} ranks, expected 1 or more")
    if world_size == 1:
        return
    if spec.num_ranks != 1:
        raise PlanError(f"{spec.name} is split over {spec.num_ranks} ranks already")
    _check_family(spec)
    for group in spec.cache_groups:
        _check_heads(spec, group, world_size)
    experts = _settled(spec, world_size, experts)
    for number, layer in enumerate(spec.layers):
        _check_layer(spec, number, layer, world_size, experts)
    if experts == "whole":
        _check_experts(spec)


def rank_spec(spec: ModelSpec, world_size: int, experts: Experts = "auto") -> ModelSpec:
    """Return the model as one of the ranks has it, weights and heads alike.

    Raises PlanError as `check_sharding`.
    """
    check_sharding(spec, world_size, experts)
    if world_size == 1:
        return spec
    experts = _settled(spec, world_size, experts)
    groups = tuple(
        replace(
            group,
            num_heads=group.num_heads // world_size,
            num_kv_heads=kv_heads_of(group.num_kv_heads, world_size),
        )
        for group in spec.cache_groups
    )
    layers = []
    for number, layer in enumerate(spec.layers):
        heads = _heads_of(spec, number)
        each = _of_rank(layer.each, heads, world_size)
        if experts == "whole":
            own = _own_experts(layer.experts, world_size)
        else:
            own = _of_rank(layer.experts, heads, world_size)
        # A rank has some rows of a table by token ids.
        width = max(1, spec.layer_input_size)
        looked_up = -(-layer.looked_up // width // world_size) * width
        layers.append(replace(layer, each=each, experts=own, looked_up=looked_up))
    return replace(spec, cache_groups=groups, layers=tuple(layers), num_ranks=world_size)


def rank_bytes(spec: ModelSpec, span: Span, form: str, world_size: int, experts: Experts = "auto") -> int:
    """Return one rank's weight bytes of a stage, common parts included; ``form`` is a kernel or a dtype."""
    own = rank_spec(spec, world_size, experts)
    return own.weight_bytes(span.start, span.end, embed=span.embed, output=span.output, dtype=form)


def settle(spec: ModelSpec, shard: Shard | None) -> Shard:
    """Return the shard with "auto" decided; the whole stage for one rank, or for None."""
    if shard is None or shard.world_size == 1:
        return WHOLE
    return replace(shard, experts=_settled(spec, shard.world_size, shard.experts))


def share_of(num_bytes: int, spec: ModelSpec, stage: StageAssignment, form: str) -> float:
    """Return ``num_bytes`` as a share of the whole stage's weight bytes; 1 if it has none."""
    ends = {"embed": stage.embed, "output": stage.output}
    whole = spec.weight_bytes(stage.start, stage.end, **ends, dtype=form)
    return num_bytes / whole if whole else 1.0


def kv_heads_of(num_kv_heads: int, world_size: int) -> int:
    """Return how many of ``num_kv_heads`` a rank has."""
    return max(1, num_kv_heads // world_size)


def first_kv_head(num_kv_heads: int, shard: Shard) -> int:
    """Return the rank's first K/V head; several ranks have the same if there are fewer heads than ranks."""
    return shard.rank * num_kv_heads // shard.world_size


def _settled(spec: ModelSpec, world_size: int, experts: Experts) -> Experts:
    if experts != "auto":
        return experts
    widths = {_width(matrix) for layer in spec.layers for matrix in layer.experts.linears}
    counts = {layer.num_experts for layer in spec.layers}
    if FAMILIES[spec.family].shared_expert_alike or not any(width % world_size for width in widths):
        return "split"
    return "split" if any(count % world_size for count in counts) else "whole"


def _width(matrix: Matrix) -> int:
    """Return the width that ranks share of a matrix; 0 if they share nothing, or heads."""
    return {"outputs": matrix.outputs, "inputs": matrix.inputs}.get(matrix.split, 0)


def _check_family(spec: ModelSpec) -> None:
    reason = FAMILIES[spec.family].unshared or None
    if reason is None and spec.num_streams > 1:
        reason = "several hidden states go from layer to layer"
    for group in spec.cache_groups:
        reason = reason or _UNFIT_KINDS.get(group.kind)
    if reason is not None:
        raise PlanError(
            f"the layers of {spec.name} cannot be shared by ranks: {reason}",
            hint="hold whole layers on each member: --parallel pipeline",
        )


def _check_heads(spec: ModelSpec, group: CacheGroup, world_size: int) -> None:
    if group.num_heads % world_size:
        raise PlanError(
            f"{spec.name} has {group.num_heads} heads in layers of {group.name}, which {world_size} ranks "
            "cannot share alike",
            hint=_OTHER_RANKS,
        )
    if group.num_kv_heads % world_size and world_size % group.num_kv_heads:
        raise PlanError(
            f"{spec.name} has {group.num_kv_heads} K/V heads in layers of {group.name}, which {world_size} "
            "ranks can neither share alike nor repeat alike",
            hint=_OTHER_RANKS,
        )


def _check_experts(spec: ModelSpec) -> None:
    if not any(layer.num_experts for layer in spec.layers):
        raise PlanError(f"{spec.name} has no experts to share out whole", hint=_PIPELINE)
    if FAMILIES[spec.family].shared_expert_alike:
        raise PlanError(
            f"the experts of {spec.name} cannot be shared out whole: one for all rows is as wide as they are",
            hint=_PIPELINE,
        )


def _check_layer(
    spec: ModelSpec, number: int, layer: LayerWeights, world_size: int, experts: Experts
) -> None:
    if experts == "whole" and layer.num_experts % world_size:
        raise PlanError(
            f"layer {number} of {spec.name} has {layer.num_experts} experts, which {world_size} ranks cannot "
            "share out alike",
            hint=_OTHER_RANKS,
        )
    split = layer.each.linears if experts == "whole" else (*layer.each.linears, *layer.experts.linears)
    for matrix in split:
        width = _width(matrix)
        if width % world_size:
            raise PlanError(
                f"layer {number} of {spec.name} has linears {width} wide, which {world_size} ranks cannot "
                "share alike",
                hint=_OTHER_RANKS,
            )


def _heads_of(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Return the heads and K/V heads of a layer: its own, or those of its source."""
    own = spec.kv_sources.get(layer, layer)
    group = next(group for group in spec.cache_groups if own in group.layers)
    return group.num_heads, group.num_kv_heads


def _of_rank(part: WeightPart, heads: tuple[int, int], world_size: int) -> WeightPart:
    linears = tuple(_slice_of(matrix, heads, world_size) for matrix in part.linears)
    split = part.others_split // world_size
    keys = part.others_keys // heads[1] * kv_heads_of(heads[1], world_size)
    others = part.others - part.others_split - part.others_keys + split + keys
    return WeightPart(linears, others, split, keys)


def _own_experts(part: WeightPart, world_size: int) -> WeightPart:
    linears = tuple(replace(matrix, count=matrix.count // world_size) for matrix in part.linears)
    return WeightPart(linears, part.others // world_size)


def _slice_of(matrix: Matrix, heads: tuple[int, int], world_size: int) -> Matrix:
    if matrix.split == "inputs":
        inputs, kept_bytes = matrix.inputs // world_size, matrix.kept_bytes // world_size
        card_bytes = matrix.card_bytes // world_size
        return replace(matrix, inputs=inputs, kept_bytes=kept_bytes, card_bytes=card_bytes)
    if not matrix.split:
        return matrix
    queries, keys = heads
    own = queries // world_size, kv_heads_of(keys, world_size)
    outputs = {
        "outputs": matrix.outputs // world_size,
        "keys": matrix.outputs // keys * own[1],
        "joined": matrix.outputs // (queries + 2 * keys) * (own[0] + 2 * own[1]),
    }[matrix.split]
    kept_bytes, card_bytes = (
        whole * outputs // matrix.outputs for whole in (matrix.kept_bytes, matrix.card_bytes)
    )
    return replace(matrix, outputs=outputs, kept_bytes=kept_bytes, card_bytes=card_bytes)
