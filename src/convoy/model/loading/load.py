"""Load the part of a model that a stage owns, as the model's own modules from `transformers`."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from convoy.errors import ModelError
from convoy.model.checkpoints.names import EMBEDDING
from convoy.model.checkpoints.owned import LAYER_INPUT_NAMES
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.stage_tensors import LoadProgress, Reading, TensorPart
from convoy.model.checkpoints.tied import check_tied
from convoy.model.kernels.release_memory import large_apart
from convoy.model.kernels.stored.embedding import Embedding, StoredEmbedding
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.weights import Weight
from convoy.model.layers.exact import RowNorm, make_layer_exact, make_norm_exact
from convoy.model.layers.layer_inputs import LayerInputs
from convoy.model.layers.rope import RopeUse
from convoy.model.layers.streams import StreamJoin
from convoy.model.loading.decoder import build_decoder, decoder_config
from convoy.model.loading.join_ranks import join_parts
from convoy.model.loading.loaded import LoadedModules
from convoy.model.loading.withheld import Withheld
from convoy.model.parallel.ranks import Ranks
from convoy.model.quantize.load import LoadRounding
from convoy.plan.spec.family import Family
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.sharding import WHOLE, Shard, rank_spec
from convoy.wire.messages.control import StageAssignment

# float32 bytes; less than a layer of most models has, so that layers are built one at a time
_PORTION_BYTES = 128 << 20


def load_modules(
    source: ModelSource,
    assignment: StageAssignment,
    *,
    packed: bool,
    keeps: bool = False,
    bits: int = 0,
    progress: LoadProgress | None,
    kept: LoadedModules | None = None,
    shard: Shard = WHOLE,
    portion_bytes: int = _PORTION_BYTES,
) -> LoadedModules:
    """Read just the tensors of the assignment and build its modules in float32.

    ``packed`` gives exact mode's layers. If it ``keeps`` the forms of the file, their matrices are not
    unpacked. With ``bits`` they are rounded as `convoy quantize` rounds
    them, and kept in its form or unpacked. Layers are built a few at a time, so that the original weights
    of only these few are in memory beside the converted ones. Modules of ``kept``, which were loaded earlier
    from the same source in the same form, are reused where still owned; the others are freed first. Layers of
    ``portion_bytes`` in float32 are built together. With a ``shard``, only one rank's slice is loaded. Raises
    ModelError for a span outside the model, and for missing, misshapen or unreadable tensors, naming them.
    """
    if not 0 <= assignment.start <= assignment.end <= source.spec.num_layers:
        raise ModelError(
            f"{source.name} has layers 0 to {source.spec.num_layers - 1}, "
            f"asked for {assignment.start} to {assignment.end - 1}"
        )
    kept = _usable(kept, assignment)
    part = _lacking(assignment, kept)
    if kept is not None and not (part.layers or part.embed or part.output):
        kept.bytes_read = 0
        return kept
    if part.output:
        check_tied(source)
    whole, source = source, replace(source, spec=rank_spec(source.spec, shard.world_size, shard.experts))
    rounds = LoadRounding(whole, bits).read if bits else lambda _name: None
    reading = Reading(whole, part, progress, shard, keeps=keeps, rounds=rounds)
    ranks = Ranks(shard) if kept is None or kept.ranks is None else kept.ranks
    loaded = kept
    with large_apart():
        for portion in _portions(source, part, portion_bytes):
            fresh = _load_portion(source, portion, reading, packed=packed)
            fresh.settle(packed=packed)
            if shard.world_size > 1:
                join_parts(fresh, ranks)
            loaded = fresh if loaded is None else _joined(loaded, fresh)
    assert loaded is not None
    loaded.bytes_read = reading.num_bytes
    return loaded


def require_codes(source: ModelSource) -> None:
    """Raise ModelError if all linears of a model are plain numbers, which have no 8-bit products.

    The whole model counts, and not what a stage holds. So each member decides alike, over every cut.
    """
    looked_up = () if source.spec.tied_embeddings else (EMBEDDING,)
    if source.layout.rounded.difference(looked_up):
        return
    dtypes = {tensor.dtype for tensor in source.tensors.values() if len(tensor.shape) > 1}
    raise ModelError(
        f"8-bit products are for rounded weights, and these are in {' and '.join(sorted(dtypes))}",
        hint="add --quantize q8 or q4 (convoy verify: --kernel exact-q8), or leave out --compute int8",
    )


def _usable(kept: LoadedModules | None, assignment: StageAssignment) -> LoadedModules | None:
    if kept is None or kept.layer_inputs is not None:
        # inputs by layer are made for all layers of a stage at once, so they cannot be reused
        return None
    kept.narrow(assignment)
    return kept


def _portions(source: ModelSource, part: TensorPart, portion_bytes: int) -> Iterator[TensorPart]:
    """Yield the parts to build at a time: first embedding and output, then runs of a few layers."""
    if source.spec.layer_input_size and part.layers:
        # the inputs by layer are made for all layers at once
        yield part
        return
    if _num_bytes(source, part) <= portion_bytes:
        # the library builds all layers of the model for each portion
        yield part
        return
    if part.output and part.embed and not source.spec.tied_embeddings:
        # the output may shrink to a quarter of its stored size: load it first, while memory is empty
        yield TensorPart(frozenset(), embed=False, output=True)
        yield TensorPart(frozenset(), embed=True, output=False)
    elif part.embed or part.output or not part.layers:
        yield replace(part, layers=frozenset())
    layers: set[int] = set()
    for layer in sorted(part.layers):
        layers.add(layer)
        if sum(source.spec.layer_bytes(one, "float32") for one in layers) >= portion_bytes:
            yield TensorPart(frozenset(layers), embed=False, output=False)
            layers = set()
    if layers:
        yield TensorPart(frozenset(layers), embed=False, output=False)


def _num_bytes(source: ModelSource, part: TensorPart) -> int:
    """Return the bytes of a part in float32."""
    spec, dtype = source.spec, "float32"
    ends = part.embed * spec.embed_bytes(dtype) + part.output * spec.output_bytes(dtype)
    return ends + sum(spec.layer_bytes(layer, dtype) for layer in part.layers)


def _load_portion(source: ModelSource, part: TensorPart, reading: Reading, *, packed: bool) -> LoadedModules:
    config = decoder_config(source, part, reading.shard)
    state = reading.read(part)
    beside = {
        name: value
        for name, value in state.items()
        if name.startswith(LAYER_INPUT_NAMES) and isinstance(value, torch.Tensor)
    }
    for name in beside:
        del state[name]
    withheld = Withheld(state, source.spec.family, packed=packed and part.output)
    try:
        model = build_decoder(source, part, config, state, reading.shard, withheld=withheld)
    finally:
        withheld.release()
    del state
    return _take_modules(source, model, beside, embed=part.embed, packed=packed)


def _lacking(assignment: StageAssignment, kept: LoadedModules | None) -> TensorPart:
    layers = frozenset(range(assignment.start, assignment.end))
    if kept is None:
        return TensorPart(layers, assignment.embed, assignment.output)
    ends = kept.embedding is None and kept.output is None
    return TensorPart(layers - kept.layers.keys(), assignment.embed and ends, assignment.output and ends)


def _joined(kept: LoadedModules, fresh: LoadedModules) -> LoadedModules:
    layers = kept.layers | fresh.layers
    looked_up = kept if fresh.embedding is None else fresh
    output = kept if fresh.output is None else fresh
    return replace(
        fresh,
        embedding=looked_up.embedding,
        embed_scale=looked_up.embed_scale,
        layers={layer: layers[layer] for layer in sorted(layers)},
        norm=output.norm,
        output=output.output,
        ropes=kept.ropes | fresh.ropes,
    )


def _take_modules(
    source: ModelSource, model: Any, beside: dict[str, torch.Tensor], *, embed: bool, packed: bool
) -> LoadedModules:
    """Take the owned modules out of the model, packing and freeing them one by one."""
    decoder, output, config = model.model, model.lm_head, model.config
    layers = {i: layer for i, layer in enumerate(decoder.layers) if not isinstance(layer, nn.Identity)}
    _check_heads(source, layers)
    family, rotary = FAMILIES[source.spec.family], decoder.rotary_emb
    ropes = {i: _make_layer(layers, i, rotary, config, family, packed=packed) for i in list(layers)}
    embedding: Weight | None = getattr(decoder.embed_tokens, "weight", None)
    scale, norm = _embed_scale(decoder, config), _final_norm(decoder, packed=packed)
    if isinstance(output, nn.Identity):
        norm = output = None
    elif packed:
        # `lm_head` is converted later, once it is known whether it is rounded
        norm = make_norm_exact(norm, family)
    lookup = _lookup(embedding) if embed or beside else None
    return LoadedModules(
        embedding=lookup if embed else None,
        layers=layers,
        norm=norm,
        output=output,
        rotary=rotary,
        ropes=ropes,
        embed_scale=scale,
        logit_scale=_logit_scale(config),
        logit_cap=getattr(config, "final_logit_softcapping", None),
        layer_inputs=_layer_inputs(config, beside, lookup, scale, layers, packed=packed),
        bytes_read=0,
    )


def _final_norm(decoder: Any, *, packed: bool) -> Any:
    """Return the final norm, combined with the module that joins several hidden states if there is one."""
    norm = decoder.norm
    head = getattr(decoder, "hc_head", None)
    return norm if head is None or isinstance(norm, nn.Identity) else StreamJoin(head, norm, packed=packed)


def _embed_scale(decoder: Any, config: Any) -> float | None:
    """Return the scale of embeddings: Gemma's embedding module has it, Granite's configuration does."""
    scale: float | None = getattr(decoder.embed_tokens, "scalar_embed_scale", None)
    return getattr(config, "embedding_multiplier", None) if scale is None else scale


def _logit_scale(config: Any) -> float | None:
    """Return the factor of the logits: Cohere multiplies them, Granite divides them."""
    scaling = getattr(config, "logits_scaling", None)
    scale: float | None = getattr(config, "logit_scale", None)
    return scale if scaling is None else 1 / float(scaling)


def _check_heads(source: ModelSource, layers: Mapping[int, nn.Module]) -> None:
    """Refuse a model with other heads than planned: its K/V would not fit the pools."""
    for group in source.spec.cache_groups:
        for number in set(group.layers) & layers.keys():
            attention: Any = getattr(layers[number], "self_attn", None)
            if not group.has_heads or attention is None:
                continue
            found = (attention.head_dim, attention.num_key_value_groups)
            expected = (group.head_dim, group.num_heads // group.num_kv_heads)
            if found != expected:
                raise ModelError(
                    f"{source.name}: layer {number} has heads of {found[0]}, {found[1]} to a K/V head, "
                    f"expected {expected[0]} and {expected[1]}"
                )


def _make_layer(
    layers: dict[int, nn.Module], number: int, rotary: Any, config: Any, family: Family, *, packed: bool
) -> RopeUse:
    """Return the rotation that layer ``number`` uses; make the layer exact if ``packed``."""
    layer: Any = layers[number]
    for path, place in family.replaced.items():
        if not path:
            layers[number] = replacement(place)(layer, packed=packed)
            return RopeUse(layer.self_attn.rope_layer_type)
        # A family may have parts in some layers alone.
        if (part := getattr(layer, path, None)) is not None:
            layer.set_submodule(path, replacement(place)(part, packed=packed))
    by_type = isinstance(getattr(rotary, "rope_type", None), dict)
    layer_type = str(config.layer_types[number]) if by_type else None
    if not packed:
        return RopeUse(layer_type)
    frequencies = getattr(rotary, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
    attention = make_layer_exact(layer, 2 * frequencies.numel(), family)
    return RopeUse(layer_type, None if attention is None else attention.spread)


def replacement(place: str) -> Callable[..., nn.Module]:
    """Return the class of ours that a family's row names as "module:class".

    It is called with a part of the library's layer and with ``packed``. The row names it, so that a new kind
    of layer changes no table here.
    """
    module, _, name = place.partition(":")
    found: Callable[..., nn.Module] = getattr(importlib.import_module(module), name)
    return found


def _layer_inputs(
    config: Any,
    beside: dict[str, torch.Tensor],
    embedding: Embedding | None,
    embed_scale: float | None,
    layers: Iterable[int],
    *,
    packed: bool,
) -> LayerInputs | None:
    if not beside or embedding is None:
        return None
    table, projection, norm = (beside[f"{name}.weight"] for name in LAYER_INPUT_NAMES)
    width = config.hidden_size_per_layer_input
    parts = {layer: slice(layer * width, (layer + 1) * width) for layer in layers}
    return LayerInputs(
        embedding,
        1.0 if embed_scale is None else embed_scale,
        RowNorm(norm.to(torch.float32), config.rms_norm_eps),
        {layer: table[:, part].to(torch.float32).contiguous() for layer, part in parts.items()},
        {layer: projection[part] for layer, part in parts.items()},
        packed=packed,
    )


def _lookup(weight: Weight | None) -> Embedding | None:
    if weight is None:
        return None
    if isinstance(weight, StoredMatrix):
        return StoredEmbedding(weight)
    module: nn.Embedding = nn.Embedding.from_pretrained(weight.detach())  # type: ignore[no-untyped-call]
    return module
