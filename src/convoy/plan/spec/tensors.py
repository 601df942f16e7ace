"""The weights of a decoder layer, by name and shape, as `transformers` names them behind ``model.layers.N.``.

Experts stand as one tensor for all, as the library holds them; checkpoints may have them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from convoy.plan.spec.compressed import Compression, hashed_layers
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import MAX_EXPERTS, MAX_LAYERS, MAX_STREAMS, MAX_VOCABULARY, MAX_WIDTH, Family
from convoy.plan.spec.heads import LayerHeads

Shape = tuple[int, ...]
Tensors = Iterator[tuple[str, Shape]]


@dataclass(frozen=True)
class Streams:
    """Count the hidden states of a token between layers, and the weights that several of them need.

    ``joining_elements`` counts the weights that join them before the output. ``hashed`` lists the layers with
    a table of the experts for each token id.
    """

    num: int = 1
    joining_elements: int = 0
    hashed: frozenset[int] = frozenset()
    table_elements: int = 0

    def table_of(self, layer: int) -> int:
        """Return the elements of a layer's table."""
        return self.table_elements if layer in self.hashed else 0


def layer_tensors(
    reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden_size: int
) -> Tensors:
    """Yield name and shape of each weight of layer ``number``. Raises ModelError for impossible values."""
    attention = _ATTENTION.get(family.heads, _attention)
    if heads.kind == "recurrent":
        attention = _delta_net
    yield from attention(reader, family, heads, hidden_size)
    yield "input_layernorm.weight", (hidden_size,)
    yield "post_attention_layernorm.weight", (hidden_size,)
    if family.num_norms == 4:
        yield "pre_feedforward_layernorm.weight", (hidden_size,)
        yield "post_feedforward_layernorm.weight", (hidden_size,)
    feed_forward = _EXPERTS[family.experts] if family.experts else _mlp
    yield from feed_forward(reader, family, number, heads, hidden_size)


def per_layer_input(reader: ConfigReader, family: Family) -> tuple[int, int]:
    """Return width and vocabulary of every layer's own input beside the hidden state; (0, 0) for none."""
    if family.experts != "gemma4" or not reader.get("hidden_size_per_layer_input"):
        return 0, 0
    return (
        reader.count("hidden_size_per_layer_input", most=MAX_WIDTH),
        reader.count("vocab_size_per_layer_input", most=MAX_VOCABULARY),
    )


def read_streams(reader: ConfigReader, family: Family, num_layers: int, hidden: int) -> Streams:
    """Return the streams of hidden states, and the layers with experts chosen by token id."""
    if family.heads != "compressed":
        return Streams()
    num, hashed = reader.count("hc_mult", most=MAX_STREAMS), hashed_layers(reader, num_layers)
    chosen = reader.count("num_experts_per_tok", most=MAX_EXPERTS)
    # The table's entries are 64 bits wide, two elements of float32.
    table = 2 * chosen * reader.count("vocab_size", most=MAX_VOCABULARY)
    return Streams(num, num * num * hidden + num + 1, hashed, table)


def _linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Tensors:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def _attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:
    bias = reader.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias
    query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    own = heads.kv_source is None
    if family.qkv == "joined":
        yield from _linear("self_attn.qkv_proj", query + 2 * key, hidden, bias=bias)
    else:
        yield from _linear("self_attn.q_proj", query * (2 if family.gated else 1), hidden, bias=bias)
        if own:
            yield from _linear("self_attn.k_proj", key, hidden, bias=bias)
        if own and not (heads.window is None and reader.flag("attention_k_eq_v")):
            yield from _linear("self_attn.v_proj", key, hidden, bias=bias)
    yield from _linear("self_attn.o_proj", hidden, query, bias=bias and family.out_bias)
    if family.qk_norm:
        yield "self_attn.q_norm.weight", (heads.head_dim,)
    if family.qk_norm and own:
        yield "self_attn.k_norm.weight", (heads.head_dim,)
    if family.sinks:
        yield "self_attn.sinks", (heads.num_heads,)


def _latent_attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - as `_attention`
    bias = reader.flag("attention_bias")
    latent, rotary = heads.value_dim, heads.head_dim - heads.value_dim
    fixed = reader.count("qk_nope_head_dim", most=MAX_WIDTH)
    value = reader.count("v_head_dim", most=MAX_WIDTH)
    query = heads.num_heads * (fixed + rotary)
    rank = reader.optional_count("q_lora_rank", most=MAX_WIDTH)
    if rank is None:
        yield from _linear("self_attn.q_proj", query, hidden)
    else:
        yield from _linear("self_attn.q_a_proj", rank, hidden, bias=bias)
        yield "self_attn.q_a_layernorm.weight", (rank,)
        yield from _linear("self_attn.q_b_proj", query, rank)
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent + rotary, hidden, bias=bias)
    yield "self_attn.kv_a_layernorm.weight", (latent,)
    yield from _linear("self_attn.kv_b_proj", heads.num_heads * (fixed + value), latent)
    yield from _linear("self_attn.o_proj", hidden, heads.num_heads * value, bias=bias)


def _delta_net(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - as `_attention`
    value = heads.num_heads * heads.value_dim
    yield "linear_attn.dt_bias", (heads.num_heads,)
    yield "linear_attn.A_log", (heads.num_heads,)
    yield "linear_attn.conv1d.weight", (heads.mixed_width, 1, heads.num_taps)
    yield "linear_attn.norm.weight", (heads.value_dim,)
    yield from _linear("linear_attn.out_proj", hidden, value)
    yield from _linear("linear_attn.in_proj_qkv", heads.mixed_width, hidden)
    yield from _linear("linear_attn.in_proj_z", value, hidden)
    yield from _linear("linear_attn.in_proj_b", heads.num_heads, hidden)
    yield from _linear("linear_attn.in_proj_a", heads.num_heads, hidden)


def _compressed_attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - as `_attention`
    query, dim = heads.num_heads * heads.head_dim, heads.head_dim
    rank, made = reader.count("q_lora_rank", most=MAX_WIDTH), heads.compression
    groups, between = reader.count("o_groups", most=MAX_WIDTH), reader.count("o_lora_rank", most=MAX_WIDTH)
    yield "self_attn.sinks", (heads.num_heads,)
    yield from _linear("self_attn.q_a_proj", rank, hidden)
    yield "self_attn.q_a_norm.weight", (rank,)
    yield from _linear("self_attn.q_b_proj", query, rank)
    yield from _linear("self_attn.kv_proj", dim, hidden)
    yield "self_attn.kv_norm.weight", (dim,)
    yield from _linear("self_attn.o_a_proj", groups * between, query // groups)
    yield from _linear("self_attn.o_b_proj", hidden, groups * between)
    if made is None:
        return
    yield from _compressor("self_attn.compressor", made, dim, hidden)
    if made.kind == "sparse":
        name = "self_attn.compressor.indexer"
        yield from _compressor(name, made, made.index_dim, hidden)
        yield from _linear(f"{name}.q_b_proj", made.index_heads * made.index_dim, rank)
        yield from _linear(f"{name}.scorer.weights_proj", made.index_heads, hidden)


def _compressor(name: str, made: Compression, dim: int, hidden: int) -> Tensors:
    yield f"{name}.position_bias", (made.rate, made.series * dim)
    yield from _linear(f"{name}.kv_proj", made.series * dim, hidden)
    yield from _linear(f"{name}.gate_proj", made.series * dim, hidden)
    yield f"{name}.kv_norm.weight", (dim,)


_ATTENTION = {"latent": _latent_attention, "compressed": _compressed_attention}


def _mlp(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - as the experts'
    between = reader.count("intermediate_size", most=MAX_WIDTH)
    bias = family.mlp_bias and reader.flag("mlp_bias")
    if family.mlp == "joined":
        yield from _linear("mlp.gate_up_proj", 2 * between, hidden, bias=bias)
        yield from _linear("mlp.down_proj", hidden, between, bias=bias)
    else:
        yield from _gated("mlp", between, hidden, bias=bias)


def _gated(name: str, between: int, hidden: int, *, bias: bool = False) -> Tensors:
    yield from _linear(f"{name}.gate_proj", between, hidden, bias=bias)
    yield from _linear(f"{name}.up_proj", between, hidden, bias=bias)
    yield from _linear(f"{name}.down_proj", hidden, between, bias=bias)


def _expert_stacks(name: str, count: int, between: int, hidden: int) -> Tensors:
    yield f"{name}.gate_up_proj", (count, 2 * between, hidden)
    yield f"{name}.down_proj", (count, hidden, between)


def _num_experts(reader: ConfigReader, *keys: str) -> int:
    """Return the number of experts; the library has several keys for it."""
    written = [key for key in keys if reader.has(key)]
    return reader.count((written or list(keys))[0], most=MAX_EXPERTS)


def _qwen3_moe(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:
    dense = reader.get("mlp_only_layers") or ()
    if not isinstance(dense, list | tuple):
        raise reader.wrong("mlp_only_layers", dense, "a list of layers")
    step = reader.count("decoder_sparse_step", most=MAX_LAYERS)
    if number in dense or (number + 1) % step:
        yield from _mlp(reader, family, number, heads, hidden)
        return
    count = _num_experts(reader, "num_experts", "num_local_experts")
    yield from _linear("mlp.gate", count, hidden)
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from _expert_stacks("mlp.experts", count, between, hidden)


def _shared_moe(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - one form for all
    count = _num_experts(reader, "num_experts")
    yield from _linear("mlp.gate", count, hidden)
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from _expert_stacks("mlp.experts", count, between, hidden)
    shared = reader.count("shared_expert_intermediate_size", most=MAX_WIDTH)
    yield from _gated("mlp.shared_expert", shared, hidden)
    yield from _linear("mlp.shared_expert_gate", 1, hidden)


def _gpt_oss(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - one form for all
    count = _num_experts(reader, "num_local_experts", "num_experts")
    between = reader.count("intermediate_size", most=MAX_WIDTH)
    yield from _linear("mlp.router", count, hidden, bias=True)
    yield "mlp.experts.gate_up_proj", (count, hidden, 2 * between)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * between)
    yield "mlp.experts.down_proj", (count, between, hidden)
    yield "mlp.experts.down_proj_bias", (count, hidden)


def _gemma4(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - one form for all
    """Yield an MLP, beside it the experts if there are any, and the layer's own input if it has one."""
    between = reader.count("intermediate_size", most=MAX_WIDTH)
    wide = heads.kv_source is not None and reader.flag("use_double_wide_mlp")
    yield from _gated("mlp", between * (2 if wide else 1), hidden)
    yield "layer_scalar", (1,)
    if reader.flag("enable_moe_block"):
        count = _num_experts(reader, "num_experts")
        yield from _linear("router.proj", count, hidden)
        yield "router.scale", (hidden,)
        yield "router.per_expert_scale", (count,)
        yield from _expert_stacks(
            "experts", count, reader.count("moe_intermediate_size", most=MAX_WIDTH), hidden
        )
        for name in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
            yield f"{name}.weight", (hidden,)
        yield "pre_feedforward_layernorm_2.weight", (hidden,)
    width, _ = per_layer_input(reader, family)
    if width:
        yield from _linear("per_layer_input_gate", width, hidden)
        yield from _linear("per_layer_projection", hidden, width)
        yield "post_per_layer_input_norm.weight", (hidden,)


def _deepseek_v3(
    reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int
) -> Tensors:
    first = reader.get("first_k_dense_replace")
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise reader.wrong("first_k_dense_replace", first, "a whole number from 0")
    if number < first:
        yield from _mlp(reader, family, number, heads, hidden)
        return
    count = _num_experts(reader, "n_routed_experts", "num_local_experts")
    _check_groups(reader, count)
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from _linear("mlp.gate", count, hidden)
    yield "mlp.gate.e_score_correction_bias", (count,)
    yield from _expert_stacks("mlp.experts", count, between, hidden)
    shared = between * reader.count("n_shared_experts", most=MAX_EXPERTS)
    yield from _gated("mlp.shared_experts", shared, hidden)


def _check_groups(reader: ConfigReader, count: int) -> None:
    """Check that experts lie in groups of one size: a token chooses its best groups."""
    groups = reader.optional_count("n_group", most=MAX_EXPERTS)
    if groups is None:
        return
    if count % groups:
        raise reader.wrong("n_group", groups, f"a divisor of the {count} experts")
    reader.count("topk_group", most=groups, default=1)


def _deepseek_v4(
    reader: ConfigReader,
    family: Family,  # noqa: ARG001 - as the others'
    number: int,
    heads: LayerHeads,  # noqa: ARG001 - as the others'
    hidden: int,
) -> Tensors:
    """Yield the experts, and the weights that mix the streams before attention and before the experts."""
    count = _num_experts(reader, "n_routed_experts", "num_local_experts")
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from _linear("mlp.gate", count, hidden)
    if number not in hashed_layers(reader, reader.count("num_hidden_layers", most=MAX_LAYERS)):
        yield "mlp.gate.e_score_correction_bias", (count,)
    yield from _expert_stacks("mlp.experts", count, between, hidden)
    yield from _gated("mlp.shared_experts", between, hidden, bias=reader.flag("mlp_bias"))
    streams = reader.count("hc_mult", most=MAX_STREAMS)
    weights = (2 + streams) * streams
    for name in ("attn_hc", "ffn_hc"):
        yield f"{name}.fn", (weights, streams * hidden)
        yield f"{name}.base", (weights,)
        yield f"{name}.scale", (3,)


_FeedForward = Callable[[ConfigReader, Family, int, LayerHeads, int], Tensors]
_EXPERTS: dict[str, _FeedForward] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_5_moe": _shared_moe,
    "gpt_oss": _gpt_oss,
    "gemma4": _gemma4,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v4": _deepseek_v4,
}
