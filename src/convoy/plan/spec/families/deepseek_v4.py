"""DeepSeek V4: compressed attention, several hidden states a token, and experts by token id."""

from __future__ import annotations

from dataclasses import replace

from convoy.plan.spec.compressed import Compression, hashed_layers, read_compressions
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import (
    MAX_CONTEXT,
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_STREAMS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    Family,
    LayerHeads,
    Streams,
    Tensors,
)
from convoy.plan.spec.heads import check_divides, check_head_dim
from convoy.plan.spec.tensors import expert_stacks, gated, linear, num_experts

_DEFAULTS: dict[str, object] = {
    "vocab_size": 129_280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "n_routed_experts": 256,
    "max_position_embeddings": 1_048_576,
    "hc_mult": 4,
    "sliding_window": 128,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}


def _heads(
    reader: ConfigReader,
    family: Family,  # noqa: ARG001 - as the others'
    num_layers: int,
    hidden_size: int,  # noqa: ARG001 - as the others'
) -> tuple[LayerHeads, ...]:
    """Return heads with one key a token, which is its value too, and the layers' entries beyond."""
    num_heads = reader.count("num_attention_heads", most=MAX_WIDTH)
    head_dim = reader.count("head_dim", most=MAX_WIDTH)
    check_head_dim(reader, "head_dim", head_dim, num_heads)
    check_divides(reader, "o_groups", reader.count("o_groups", most=MAX_WIDTH), num_heads)
    window = reader.count("sliding_window", most=MAX_CONTEXT)
    alike = LayerHeads(num_heads, 1, head_dim, head_dim, window, kind="latent")
    return tuple(replace(alike, compression=made) for made in read_compressions(reader, num_layers))


def _attention(reader: ConfigReader, family: Family, heads: LayerHeads, hidden: int) -> Tensors:  # noqa: ARG001 - one form for all
    query, dim = heads.num_heads * heads.head_dim, heads.head_dim
    rank, made = reader.count("q_lora_rank", most=MAX_WIDTH), heads.compression
    groups, between = reader.count("o_groups", most=MAX_WIDTH), reader.count("o_lora_rank", most=MAX_WIDTH)
    yield "self_attn.sinks", (heads.num_heads,)
    yield from linear("self_attn.q_a_proj", rank, hidden)
    yield "self_attn.q_a_norm.weight", (rank,)
    yield from linear("self_attn.q_b_proj", query, rank)
    yield from linear("self_attn.kv_proj", dim, hidden)
    yield "self_attn.kv_norm.weight", (dim,)
    yield from linear("self_attn.o_a_proj", groups * between, query // groups)
    yield from linear("self_attn.o_b_proj", hidden, groups * between)
    if made is None:
        return
    yield from _compressor("self_attn.compressor", made, dim, hidden)
    if made.kind == "sparse":
        name = "self_attn.compressor.indexer"
        yield from _compressor(name, made, made.index_dim, hidden)
        yield from linear(f"{name}.q_b_proj", made.index_heads * made.index_dim, rank)
        yield from linear(f"{name}.scorer.weights_proj", made.index_heads, hidden)


def _compressor(name: str, made: Compression, dim: int, hidden: int) -> Tensors:
    yield f"{name}.position_bias", (made.rate, made.series * dim)
    yield from linear(f"{name}.kv_proj", made.series * dim, hidden)
    yield from linear(f"{name}.gate_proj", made.series * dim, hidden)
    yield f"{name}.kv_norm.weight", (dim,)


def _feed_forward(
    reader: ConfigReader,
    family: Family,  # noqa: ARG001 - as the others'
    number: int,
    heads: LayerHeads,  # noqa: ARG001 - as the others'
    hidden: int,
) -> Tensors:
    """Yield the experts, and the weights that mix the streams before attention and before the experts."""
    count = num_experts(reader, "n_routed_experts", "num_local_experts")
    between = reader.count("moe_intermediate_size", most=MAX_WIDTH)
    yield from linear("mlp.gate", count, hidden)
    if number not in hashed_layers(reader, reader.count("num_hidden_layers", most=MAX_LAYERS)):
        yield "mlp.gate.e_score_correction_bias", (count,)
    yield from expert_stacks("mlp.experts", count, between, hidden)
    yield from gated("mlp.shared_experts", between, hidden, bias=reader.flag("mlp_bias"))
    streams = reader.count("hc_mult", most=MAX_STREAMS)
    weights = (2 + streams) * streams
    for name in ("attn_hc", "ffn_hc"):
        yield f"{name}.fn", (weights, streams * hidden)
        yield f"{name}.base", (weights,)
        yield f"{name}.scale", (3,)


def _streams(reader: ConfigReader, num_layers: int, hidden: int) -> Streams:
    num, hashed = reader.count("hc_mult", most=MAX_STREAMS), hashed_layers(reader, num_layers)
    chosen = reader.count("num_experts_per_tok", most=MAX_EXPERTS)
    # The table's entries are 64 bits wide, two elements of float32.
    table = 2 * chosen * reader.count("vocab_size", most=MAX_VOCABULARY)
    return Streams(num, num * num * hidden + num + 1, hashed, table)


ROWS = (
    Family(
        "deepseek_v4",
        _DEFAULTS,
        heads=_heads,
        attention=_attention,
        feed_forward=_feed_forward,
        streams=_streams,
        replaced={"": "convoy.model.layers.streams:StreamLayer"},
    ),
)
