"""Gemma 4: other heads in layers of full attention, layers that read another's K/V, and inputs of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.families.gemma import GGUF_CAPS, GGUF_GELU, GGUF_NORMS
from convoy.plan.spec.family import (
    MAX_LAYERS,
    MAX_WIDTH,
    Family,
    GgufForm,
    GgufTensor,
    LayerHeads,
    MlxForm,
    Shape,
    Tensors,
)
from convoy.plan.spec.heads import FULL, alike_heads, check_divides, check_head_dim, pattern_of_layers
from convoy.plan.spec.tensors import expert_stacks, gated, linear, num_experts, per_layer_input

_DEFAULTS: dict[str, object] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "num_hidden_layers": 30,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}


def _heads(reader: ConfigReader, family: Family, num_layers: int, hidden_size: int) -> tuple[LayerHeads, ...]:
    layers = alike_heads(reader, family, num_layers, hidden_size)
    return tuple(_shared(reader, _heads_by_layer(reader, layers)))


def _heads_by_layer(reader: ConfigReader, layers: Sequence[LayerHeads]) -> list[LayerHeads]:
    """Return the layers with other heads for full attention, or for any layer that per_layer_config names."""
    written = reader.get("per_layer_config")
    if written is not None:
        return _overridden(reader, written, layers)
    head_dim = reader.count("global_head_dim", most=MAX_WIDTH)
    num_kv_heads = None
    if reader.flag("attention_k_eq_v"):
        num_kv_heads = reader.optional_count("num_global_key_value_heads", most=MAX_WIDTH)
    return [
        layer
        if layer.window is not None
        else _other_heads(reader, layer, head_dim, num_kv_heads or layer.num_kv_heads)
        for layer in layers
    ]


def _overridden(reader: ConfigReader, written: object, layers: Sequence[LayerHeads]) -> list[LayerHeads]:
    if not isinstance(written, Mapping):
        raise reader.wrong("per_layer_config", written, "an object")
    changed = list(layers)
    for key, values in written.items():
        if not (isinstance(key, str) and key.isascii() and key.isdigit() and int(key) < len(layers)):
            raise reader.wrong("per_layer_config", key, f"numbers of layers from 0 to {len(layers) - 1}")
        if not isinstance(values, Mapping) or not values.keys() <= {"head_dim", "num_key_value_heads"}:
            raise reader.wrong(f"per_layer_config.{key}", values, "head_dim and num_key_value_heads alone")
        here = ConfigReader(values, reader.model)
        layer = layers[int(key)]
        head_dim = here.count("head_dim", most=MAX_WIDTH, default=layer.head_dim)
        num_kv_heads = here.count("num_key_value_heads", most=MAX_WIDTH, default=layer.num_kv_heads)
        changed[int(key)] = _other_heads(reader, layer, head_dim, num_kv_heads)
    return changed


def _other_heads(reader: ConfigReader, layer: LayerHeads, head_dim: int, num_kv_heads: int) -> LayerHeads:
    check_head_dim(reader, "global_head_dim", head_dim, layer.num_heads)
    check_divides(reader, "num_global_key_value_heads", num_kv_heads, layer.num_heads)
    return replace(layer, head_dim=head_dim, value_dim=head_dim, num_kv_heads=num_kv_heads)


def _shared(reader: ConfigReader, layers: Sequence[LayerHeads]) -> list[LayerHeads]:
    """Return the layers, with the source of K and V for the last ``num_kv_shared_layers``.

    The source is the last earlier layer of the same type.
    """
    if not reader.get("num_kv_shared_layers"):
        return list(layers)
    num_shared = reader.count("num_kv_shared_layers", most=len(layers) - 1)
    first = len(layers) - num_shared
    sources = {layer.window: number for number, layer in enumerate(layers[:first])}
    shared = []
    for number, layer in enumerate(layers):
        if number < first:
            shared.append(layer)
            continue
        source = sources.get(layer.window)
        if source is None or replace(layer, kv_source=None) != layers[source]:
            raise reader.wrong("num_kv_shared_layers", num_shared, "fewer: no layer before them is alike")
        shared.append(replace(layer, kv_source=source))
    return shared


def _feed_forward(
    reader: ConfigReader,
    family: Family,
    number: int,  # noqa: ARG001 - as the others'
    heads: LayerHeads,
    hidden: int,
) -> Tensors:
    """Yield an MLP, beside it the experts if there are any, and the layer's own input if it has one."""
    between = reader.count("intermediate_size", most=MAX_WIDTH)
    wide = heads.kv_source is not None and reader.flag("use_double_wide_mlp")
    yield from gated("mlp", between * (2 if wide else 1), hidden)
    yield "layer_scalar", (1,)
    if reader.flag("enable_moe_block"):
        count = num_experts(reader, "num_experts")
        yield from linear("router.proj", count, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (count,)
        yield from expert_stacks(
            "experts", count, reader.count("moe_intermediate_size", most=MAX_WIDTH), hidden
        )
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            yield f"{name}.weight", (hidden,)
        yield "pre_feedforward_layernorm_2.weight", (hidden,)
    width, _ = per_layer_input(reader, family)
    if width:
        yield from linear("per_layer_input_gate", width, hidden)
        yield from linear("per_layer_projection", hidden, width)
        yield "post_per_layer_input_norm.weight", (hidden,)


def _read_gguf(reader: ConfigReader, shapes: Mapping[str, Shape]) -> dict[str, object]:
    """Return what the file has for each layer, or for windows apart: widths, K/V heads and rotations."""
    types = pattern_of_layers(reader, period=6)
    full = {number for number, kind in enumerate(types) if kind == FULL}
    shared = (
        reader.optional_count("attention.shared_kv_layers", most=MAX_LAYERS)
        if reader.get("attention.shared_kv_layers")
        else 0
    )
    own = range(len(types) - (shared or 0))
    heads = _by_layer(reader, "attention.head_count_kv", len(types))
    widths = _by_layer(reader, "feed_forward_length", len(types))
    of_full = next((heads[number] for number in sorted(full)), heads[0])
    same = any(f"blk.{number}.attn_v.weight" not in shapes for number in full if number in own)
    return {
        "layer_types": types,
        "num_key_value_heads": next((n for i, n in enumerate(heads) if i not in full), heads[0]),
        "num_global_key_value_heads": of_full if same else None,
        "attention_k_eq_v": same,
        "num_kv_shared_layers": shared,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": reader.get("embedding_length_per_layer_input") or 0,
        "enable_moe_block": bool(reader.get("expert_count")),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": reader.optional_above_0("rope.freq_base") or 1e6,
                "partial_rotary_factor": 1.0,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": reader.optional_above_0("rope.freq_base_swa") or 1e4,
            },
        },
    }


def _by_layer(reader: ConfigReader, key: str, num_layers: int) -> list[int]:
    """Return a number for each layer; a file may have one for all."""
    found = reader.get(key)
    if not isinstance(found, list):
        return [reader.count(key, most=MAX_WIDTH)] * num_layers
    if len(found) != num_layers or not all(type(one) is int and 1 <= one <= MAX_WIDTH for one in found):
        raise reader.wrong(key, found, f"a number above 0 for each of {num_layers} layers")
    return found


_GGUF = GgufForm(
    "gemma4",
    settings={
        **GGUF_CAPS,
        "attention.key_length": "global_head_dim",
        "attention.key_length_swa": "head_dim",
        "expert_count": "num_experts",
        "expert_used_count": "top_k_experts",
        "expert_feed_forward_length": "moe_intermediate_size",
    },
    fixed=GGUF_GELU,
    read=_read_gguf,
    modules={
        **GGUF_NORMS,
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "ffn_gate_inp": "router.proj",
        "inp_gate": "per_layer_input_gate",
        "proj": "per_layer_projection",
        "post_norm": "post_per_layer_input_norm",
    },
    made={
        "layer_scalar": GgufTensor("as stored", ("layer_output_scale.weight",)),
        "router.scale": GgufTensor("as stored", ("ffn_gate_inp.scale",)),
        "router.per_expert_scale": GgufTensor("as stored", ("ffn_down_exps.scale",)),
        "experts.gate_up_proj": GgufTensor("as stored", ("ffn_gate_up_exps.weight",)),
        "experts.down_proj": GgufTensor("as stored", ("ffn_down_exps.weight",)),
    },
    ends={
        "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
        "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
        "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
    },
    own_rotation=True,
)

ROWS = (
    Family(
        "gemma4_text",
        _DEFAULTS,
        heads=_heads,
        feed_forward=_feed_forward,
        qkv_bias=None,
        out_bias=True,
        qk_norm=True,
        window="by layer type",
        full_every=6,
        ends_full=True,
        num_norms=4,
        layer_inputs=True,
        mlx=MlxForm(scaled_embeddings=True, value_norms=True),
        gguf=_GGUF,
    ),
)
