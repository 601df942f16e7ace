"""The weights of a decoder layer, by name and shape, as `transformers` names them behind ``model.layers.N.``.

Experts stand as one tensor for all, as the library holds them; checkpoints may have them one by one.
"""

from __future__ import annotations

from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import (
    MAX_EXPERTS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Family,
    LayerHeads,
    Streams,
    Tensors,
)


def layer_tensors(
    reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden_size: int
) -> Tensors:
    """Yield name and shape of each weight of layer ``number``. Raises ModelError for impossible values."""
    list_attention = family.attention or attention
    yield from list_attention(reader, family, heads, hidden_size)
    yield "input_layernorm.weight", (hidden_size,)
    yield "post_attention_layernorm.weight", (hidden_size,)
    if family.num_norms == 4:
        yield "pre_feedforward_layernorm.weight", (hidden_size,)
        yield "post_feedforward_layernorm.weight", (hidden_size,)
    feed_forward = family.feed_forward or mlp
    yield from feed_forward(reader, family, number, heads, hidden_size)


def per_layer_input(reader: ConfigReader, family: Family) -> tuple[int, int]:
    """Return width and vocabulary of every layer's own input beside the hidden state; (0, 0) for none."""
    if not family.layer_inputs or not reader.get("hidden_size_per_layer_input"):
        return 0, 0
    return (
        reader.count("hidden_size_per_layer_input", most=MAX_WIDTH),
        reader.count("vocab_size_per_layer_input", most=MAX_VOCABULARY),
    )


def read_streams(reader: ConfigReader, family: Family, num_layers: int, hidden: int) -> Streams:
    """Return the streams of hidden states, and the layers with experts chosen by token id."""
    return Streams() if family.streams is None else family.streams(reader, num_layers, hidden)


def linear(name: str, outputs: int, inputs: int, *, bias: bool = False) -> Tensors:
    """Yield a linear's matrix [outputs, inputs], and its bias if it has one."""
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:
    """Yield the linears of queries, keys, values and results, and the norms and sinks of heads."""
    bias = reader.flag("attention_bias") if family.qkv_bias is None else family.qkv_bias
    query, key = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    own = heads.kv_source is None
    if family.qkv == "joined":
        yield from linear("self_attn.qkv_proj", query + 2 * key, hidden, bias=bias)
    else:
        yield from linear("self_attn.q_proj", query * (2 if family.gated else 1), hidden, bias=bias)
        if own:
            yield from linear("self_attn.k_proj", key, hidden, bias=bias)
        if own and not (heads.window is None and reader.flag("attention_k_eq_v")):
            yield from linear("self_attn.v_proj", key, hidden, bias=bias)
    yield from linear("self_attn.o_proj", hidden, query, bias=bias and family.out_bias)
    if family.qk_norm:
        yield "self_attn.q_norm.weight", (heads.head_dim,)
    if family.qk_norm and own:
        yield "self_attn.k_norm.weight", (heads.head_dim,)
    if family.sinks:
        yield "self_attn.sinks", (heads.num_heads,)


def mlp(reader: ConfigReader, family: Family, number: int, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - as the experts'
    """Yield a gated MLP of `intermediate_size`; ``number`` and ``heads`` make no difference."""
    between = reader.count("intermediate_size", most=MAX_WIDTH)
    bias = family.mlp_bias and reader.flag("mlp_bias")
    if family.mlp == "joined":
        yield from linear("mlp.gate_up_proj", 2 * between, hidden, bias=bias)
        yield from linear("mlp.down_proj", hidden, between, bias=bias)
    else:
        yield from gated("mlp", between, hidden, bias=bias)


def gated(name: str, between: int, hidden: int, *, bias: bool = False) -> Tensors:
    """Yield the three linears of a gated MLP that is ``between`` wide."""
    yield from linear(f"{name}.gate_proj", between, hidden, bias=bias)
    yield from linear(f"{name}.up_proj", between, hidden, bias=bias)
    yield from linear(f"{name}.down_proj", hidden, between, bias=bias)


def expert_stacks(name: str, count: int, between: int, hidden: int) -> Tensors:
    """Yield the stacked matrices of ``count`` experts, with gate and up in one."""
    yield f"{name}.gate_up_proj", (count, 2 * between, hidden)
    yield f"{name}.down_proj", (count, hidden, between)


def num_experts(reader: ConfigReader, *keys: str) -> int:
    """Return the number of experts; the library has several keys for it."""
    written = [key for key in keys if reader.has(key)]
    return reader.count((written or list(keys))[0], most=MAX_EXPERTS)
