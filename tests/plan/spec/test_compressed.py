"""DeepSeek V4 in a plan: state of its layers, readers of token ids, and impossible values."""

from __future__ import annotations

from typing import Any

import pytest

from convoy.errors import ModelError
from convoy.plan.memory.blocks import BlockDemand, Room, choose_blocks
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.placement import place
from convoy.plan.report import report
from convoy.plan.spec.model import ModelSpec
from support.tiny_models import build_config

CONFIG: dict[str, Any] = build_config("deepseek_v4").to_dict()


def spec_of(**changes: Any) -> ModelSpec:
    return ModelSpec.from_config({**CONFIG, **changes}, "tiny")


def test_behind_the_window_a_layer_keeps_a_row_for_several_tokens() -> None:
    spec = spec_of()
    assert [(g.name, g.kind, g.window, g.stride, g.layers) for g in spec.cache_groups] == [
        ("window-20", "latent", 20, 1, (0, 1, 2, 3, 4, 5)),
        ("entries-12", "entries", None, 12, (1, 3)),
        ("pending-12", "pending", 12, 1, (1, 3)),
        ("entries-4", "entries", None, 4, (2, 4)),
        ("pending-8", "pending", 8, 1, (2, 4)),
    ]
    # 16 elements a head, 8 a second key; a number and a gate, for two entries where they overlap
    window, heavy, sparse = 6 * 20 * 16, 2 * (10 * 16 + 12 * 2 * 16), 2 * (30 * 24 + 8 * 4 * 24)
    assert spec.kv_bytes(0, 6, 120, "float32") == 4 * (window + heavy + sparse)
    assert spec.can_rewind


def test_its_words_of_old_mean_the_same() -> None:
    new = ("layer_types", "mlp_layer_types", "compress_rates")
    plain = {key: value for key, value in CONFIG.items() if key not in new}
    old = {
        **plain,
        "compress_ratios": [0, 128, 4, 128, 4, 0, 4],
        "num_hash_layers": 2,
        "compress_rate_hca": 12,
    }
    found, expected = ModelSpec.from_config(old, "tiny"), spec_of()
    assert found.cache_groups == expected.cache_groups
    assert found.token_id_layers == expected.token_id_layers == {0, 1}
    assert [one.elements for one in found.layers] == [one.elements for one in expected.layers]


def test_several_streams_cross_a_boundary_and_the_plan_names_who_sees_token_ids() -> None:
    spec = spec_of()
    members = [MemberOffer(name, 1 << 30, head=name == "alpha") for name in ("alpha", "beta", "gamma")]
    made = report(place(spec, members, {"alpha": "0:0,output", "beta": "1:2", "gamma": "3:5"}))
    assert {hop.bytes_per_token for hop in made.hops} == {3 * 40 * 4}
    assert made.peers_seeing_token_ids == ["beta"]
    apart = report(place(spec, members[:2], {"alpha": "0:1,output", "beta": "2:5"}))
    assert apart.peers_seeing_token_ids == []


def test_fewer_blocks_do_where_a_row_stands_for_several_tokens() -> None:
    groups = spec_of().cache_groups
    demand = BlockDemand(block_size=16, max_context=960, max_batch=2, max_row_tokens=32)
    choice = choose_blocks(groups, {"alpha": Room(1 << 30, [1] * len(groups))}, demand)
    rings = [2 * ((window - 1 + 32 + 15) // 16 + 1) for window in (20, 12, 8)]
    assert choice.num_blocks == (rings[0], 10 + 2, rings[1], 30 + 2, rings[2])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["full_attention"] * 6}, "layer_types = 'full_attention', expected one of sliding"),
        ({"layer_types": ["sliding_attention"] * 5}, "5 entries', expected num_hidden_layers = 6"),
        ({"layer_types": None, "compress_ratios": [7] * 6}, r"expected a list of \[0, 4, 128\]"),
        ({"layer_types": None, "compress_ratios": [[4]] * 6}, r"expected a list of \[0, 4, 128\]"),
        ({"mlp_layer_types": ["dense"] * 6}, "expected one of hash_moe, moe"),
        ({"mlp_layer_types": None, "num_hash_layers": -1}, "num_hash_layers = -1, expected a whole number"),
        ({"compress_rates": 4}, "compress_rates = 4, expected an object"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "compress"),
        ({"hc_mult": 0}, "hc_mult = 0, expected a whole number from 1 to 64"),
        ({"o_groups": 3}, "o_groups = 3, expected a divisor of num_attention_heads = 4"),
        ({"index_topk": None}, "no index_topk"),
    ],
)
def test_what_cannot_be_true_is_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        spec_of(**changes)
