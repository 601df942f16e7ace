"""Routes and reports: hops, members that see token ids, and missing parts."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import msgspec
import pytest

from convoy.plan.placement.placement import MemberOffer, place
from convoy.plan.placement.route import Hop, Route
from convoy.plan.report import report
from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import StageAssignment

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
SPEC = ModelSpec.from_config(CONFIG, "tiny")
OFFERS = [MemberOffer("alpha", 10**9, head=True), MemberOffer("beta", 10**9), MemberOffer("gamma", 10**9)]


def test_the_default_route_returns_only_what_the_output_needs() -> None:
    route = place(SPEC, OFFERS, {"alpha": "0:3,output"}).route
    assert route.hops == (
        Hop("alpha", "beta", 4, all_rows=True),
        Hop("beta", "gamma", 8, all_rows=True),
        Hop("gamma", "alpha", 12, all_rows=False),
    )
    assert route.describe() == "complete: alpha 0:3,output -> beta 4:7 -> gamma 8:11 -> alpha"


def test_in_the_default_layout_no_peer_sees_a_token_id() -> None:
    assert place(SPEC, OFFERS).route.token_id_members == ("alpha",)


def test_in_the_reverse_layout_the_first_peer_does() -> None:
    route = place(SPEC, OFFERS, {"alpha": "8:output"}).route
    assert route.token_id_members == ("alpha", "beta")
    assert route.hops == (Hop("beta", "gamma", 4, all_rows=True), Hop("gamma", "alpha", 8, all_rows=True))


def test_so_does_every_stage_whose_layers_need_token_ids() -> None:
    route = Route(replace(SPEC, token_id_layers=frozenset({9})), place(SPEC, OFFERS).stages, "alpha")
    assert route.token_id_members == ("alpha", "gamma")


def test_one_member_alone_has_no_hops() -> None:
    route = place(SPEC, OFFERS[:1]).route
    assert route.hops == ()
    assert route.describe() == "complete: alpha 0:output"


@pytest.mark.parametrize(
    ("gone", "missing"),
    [
        ((), ""),
        (("beta",), "layers 4-7"),
        (("gamma",), "layers 8-11"),
        (("beta", "gamma"), "layers 4-11"),
        (("alpha",), "layers 0-3 and the output"),
        (("alpha", "gamma"), "layers 0-3, layers 8-11 and the output"),
        (("alpha", "beta", "gamma"), "layers 0-11 and the output"),
    ],
)
def test_a_route_without_some_members_names_exactly_what_is_missing(
    gone: tuple[str, ...], missing: str
) -> None:
    route = place(SPEC, OFFERS).route.without(gone)
    assert route.missing == missing
    assert route.complete == (not missing)
    assert route.describe() == f"missing {missing}" or not missing


def test_a_route_can_lack_the_embedding_alone() -> None:
    route = Route(SPEC, (StageAssignment("alpha", 0, 12, embed=False, output=True),), "alpha")
    assert route.missing == "the embedding"


def test_a_report_adds_up_and_is_json() -> None:
    placement = place(SPEC, OFFERS)
    plan = report(placement)
    assert plan.weight_bytes == SPEC.weight_bytes(0, 12, embed=True, output=True, dtype="float32")
    assert plan.kv_bytes_per_token == 12 * 2 * 2 * 16 * 4
    assert plan.hop_bytes_per_token == 3 * 64 * 4
    assert plan.peers_seeing_token_ids == []
    assert [stage.span for stage in plan.stages] == ["0:3,output", "4:7", "8:11"]
    tightest = min((10**9 - stage.weight_bytes) // stage.kv_bytes_per_token for stage in plan.stages)
    assert plan.max_kv_tokens == tightest
    assert msgspec.json.decode(msgspec.json.encode(plan), type=type(plan)) == plan


def test_tokens_that_fit_are_those_of_a_sequence_whose_windows_keep_their_window() -> None:
    full, window = (
        CacheGroup("full", None, (2, 6, 10), 4, 2, 16, 16),
        CacheGroup("window-64", 64, (0, 1, 3, 4, 5, 7, 8, 9, 11), 4, 2, 16, 16),
    )
    plan = report(place(replace(SPEC, cache_groups=(full, window)), OFFERS))
    assert plan.kv_bytes_per_token == 12 * 256
    for stage in plan.stages:
        room = stage.memory_bytes - stage.weight_bytes - 3 * 256 * 64
        assert stage.max_kv_tokens == room // 256
    state = CacheGroup("state", None, tuple(range(12)), 0, 0, 0, 0, kind="recurrent", state_elements=9)
    assert report(place(replace(SPEC, cache_groups=(state,)), OFFERS)).max_kv_tokens == SPEC.max_context


def test_a_report_of_the_reverse_layout_counts_a_tied_matrix_twice_and_names_the_peer() -> None:
    plan = report(place(SPEC, OFFERS, {"alpha": "8:output"}))
    whole = SPEC.weight_bytes(0, 12, embed=True, output=True, dtype="float32")
    assert plan.weight_bytes == whole + SPEC.embed_bytes("float32")
    assert plan.peers_seeing_token_ids == ["beta"]
    assert [stage.can_read_prompts for stage in plan.stages] == ["tokens", "activations", "tokens"]


def test_every_member_with_a_layer_can_read_prompts_and_one_without_cannot() -> None:
    plan = report(place(SPEC, OFFERS), standbys=["spare"])
    assert plan.can_read_prompts == {
        "alpha": "tokens",
        "beta": "activations",
        "gamma": "activations",
        "spare": "no",
    }


@pytest.mark.outside
def test_the_plan_room_imports_neither_torch_nor_sockets_nor_asyncio() -> None:
    code = (
        "import sys; sys.path[:] = sys.argv[1:]; import convoy.plan.report, convoy.plan.spec.model; "
        "assert not {'torch', 'transformers', 'numpy', 'asyncio', 'socket'} & set(sys.modules), sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, *sys.path], check=False, capture_output=True)
    assert done.returncode == 0, done.stderr
