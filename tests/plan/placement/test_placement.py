"""Placement: layouts that work, and refusals that name the layer and the member."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import PlanError, SpanError
from convoy.plan.memory.memory import format_bytes
from convoy.plan.placement.placement import MemberOffer, Placement, place
from convoy.plan.spec.model import ModelSpec

GB = 10**9


def spec_of(num_layers: int = 12, **changes: Any) -> ModelSpec:
    config: dict[str, Any] = {
        "model_type": "llama",
        "num_hidden_layers": num_layers,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 128,
    }
    return ModelSpec.from_config({**config, **changes}, "tiny")


def members(*memory_bytes: int, head: int = 0) -> list[MemberOffer]:
    names = ["alpha", "beta", "gamma", "delta"]
    return [MemberOffer(names[i], size, head=i == head) for i, size in enumerate(memory_bytes)]


def owned(placement: Placement) -> list[tuple[str, int, int, bool, bool]]:
    return [(s.member, s.start, s.end, s.embed, s.output) for s in placement.stages]


def test_without_spans_the_head_owns_both_ends_and_peers_follow_in_roster_order() -> None:
    placement = place(spec_of(), members(GB, 2 * GB, GB))
    assert owned(placement) == [
        ("alpha", 0, 3, True, True),
        ("beta", 3, 9, False, False),
        ("gamma", 9, 12, False, False),
    ]


def test_the_head_comes_first_wherever_the_roster_lists_it() -> None:
    assert owned(place(spec_of(), members(GB, GB, head=1))) == [
        ("beta", 0, 6, True, True),
        ("alpha", 6, 12, False, False),
    ]


def test_a_head_alone_owns_everything() -> None:
    whole = [("alpha", 0, 12, True, True)]
    assert owned(place(spec_of(), members(GB))) == whole
    assert owned(place(spec_of(), members(GB), {"alpha": "0:output"})) == whole


def test_memory_decides_as_in_the_published_vectors() -> None:
    placement = place(spec_of(40), members(22 * GB, 14 * GB))
    assert [(stage.start, stage.end) for stage in placement.stages] == [(0, 24), (24, 40)]


def test_layers_of_different_sizes_are_shared_by_their_bytes() -> None:
    spec = spec_of(12)
    small, large = spec.layers[0], spec_of(12, intermediate_size=4096).layers[0]
    mixed = replace(spec, layers=(*[large] * 4, *[small] * 8))
    placement = place(mixed, members(GB, 3 * GB))
    # A quarter of the bytes is the first of the large layers.
    assert [(stage.start, stage.end) for stage in placement.stages] == [(0, 1), (1, 12)]


def test_a_member_that_unpacks_the_files_form_gets_fewer_layers() -> None:
    spec = spec_of(12)
    part = spec.layers[0].each
    kept = tuple(replace(matrix, kept_bytes=matrix.outputs * matrix.inputs // 2) for matrix in part.linears)
    layer = replace(spec.layers[0], each=replace(part, linears=kept))
    offers = [replace(one, kernel="exact-f32", unpacks=one.name == "beta") for one in members(GB, 2 * GB)]
    placement = place(replace(spec, layers=(layer,) * 12), offers)
    assert [(stage.start, stage.end) for stage in placement.stages] == [(0, 10), (10, 12)]


def test_the_default_layout_by_spans() -> None:
    placement = place(spec_of(), members(GB, GB), {"alpha": "0:3,output", "beta": "4:11"})
    assert owned(placement) == [("alpha", 0, 4, True, True), ("beta", 4, 12, False, False)]


def test_the_reverse_layout_puts_the_embedding_with_the_first_peer() -> None:
    spans = {"alpha": "8:output", "gamma": "0:3", "beta": "4:7"}
    assert owned(place(spec_of(), members(GB, GB, GB), spans)) == [
        ("gamma", 0, 4, True, False),
        ("beta", 4, 8, False, False),
        ("alpha", 8, 12, False, True),
    ]


@pytest.mark.parametrize(
    "spans",
    [
        {"alpha": "0:3", "beta": "4:7", "gamma": "8:output"},
        {"alpha": "0:3", "gamma": "8:output"},
        {"alpha": "0:3"},  # forward: the member with the last layers owns the output
        {"beta": "4:7", "gamma": "8:output"},
    ],
)
def test_the_forward_layout_gives_the_output_to_the_last_peer(spans: dict[str, str]) -> None:
    offers = [replace(member, num_threads=i) for i, member in enumerate(members(GB, GB, GB))]
    placement = place(spec_of(), offers, spans)
    assert owned(placement) == [
        ("alpha", 0, 4, True, False),
        ("beta", 4, 8, False, False),
        ("gamma", 8, 12, False, True),
    ]
    assert placement.route.describe() == "complete: alpha 0:3 -> beta 4:7 -> gamma 8:output"
    assert placement.route.token_id_members == ("alpha", "gamma")
    gone = placement.route.without(["gamma"])
    assert gone.describe() == "missing layers 8-11 and the output"


def test_without_spans_no_peer_owns_the_output() -> None:
    for head in range(3):
        placement = place(spec_of(), members(GB, GB, GB, head=head))
        assert [stage.member for stage in placement.stages if stage.output] == [placement.head]


def test_members_without_a_span_share_what_is_left() -> None:
    spec, three = spec_of(), members(GB, GB, 3 * GB)
    assert [s[:3] for s in owned(place(spec, three, {"alpha": "0:3,output"}))] == [
        ("alpha", 0, 4),
        ("beta", 4, 6),
        ("gamma", 6, 12),
    ]
    assert [s[:3] for s in owned(place(spec, three, {"alpha": "8:output"}))] == [
        ("beta", 0, 2),
        ("gamma", 2, 8),
        ("alpha", 8, 12),
    ]
    # the head, too, may be one of them: first where the first layers are left, else last
    assert owned(place(spec, three, {"beta": "6:8", "gamma": "9:11"}))[0] == ("alpha", 0, 6, True, True)
    assert owned(place(spec, three, {"beta": "0:2", "gamma": "3:8"}))[2] == ("alpha", 9, 12, False, True)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (
            {"alpha": "0:5,output", "beta": "4:11"},
            "layers 4-5 claimed twice, by alpha (0:5,output) and by beta (4:11)",
        ),
        (
            {"alpha": "0:4,output", "beta": "4:11"},
            "layer 4 claimed twice, by alpha (0:4,output) and by beta (4:11)",
        ),
        (
            {"alpha": "0:output", "beta": "4:5"},
            "layers 4-5 claimed twice, by alpha (0:output) and by beta (4:5)",
        ),
        ({"alpha": "0:3,output", "beta": "6:11"}, "no member owns layers 4-5 of 12"),
        ({"alpha": "0:3,output", "beta": "4:10"}, "no member owns layer 11 of 12"),
        ({"alpha": "8:output", "beta": "1:7"}, "no member owns layer 0 of 12"),
        (
            {"alpha": "0:3", "beta": "4:11"},
            "no member owns the output, expected the head, alpha (0:3), to own it",
        ),
        (
            {"alpha": "8:11", "beta": "0:7"},
            "no member owns the output, expected the head, alpha (8:11), to own it",
        ),
        (
            {"alpha": "0:3", "beta": "4:11"},
            "to own it, or the member with the last layers, beta (4:11)",
        ),
        (
            {"alpha": "8:11", "beta": "0:7,output"},
            "the output claimed by beta (0:7,output), expected the head, alpha (8:11), to own it",
        ),
        ({"alpha": "8:11"}, "no member owns the output, expected the head, alpha (8:11), to own it"),
        (
            {"alpha": "0:3,output", "beta": "4:output"},
            "the output claimed twice, by alpha (0:3,output) and by beta (4:output)",
        ),
        (
            {"alpha": "0:3,output", "beta": "4:12"},
            "beta: invalid span '4:12': it ends past the last layer, 11",
        ),
        ({"alpha": "0:3,output", "beta": "4-11"}, "beta: invalid span '4-11': expected A:B"),
        ({"alpha": "0:3,output", "zeta": "4:11"}, "span '4:11' is for zeta, expected a member: alpha, beta"),
        ({"alpha": "0:output"}, "no layer is left for beta"),
        ({"alpha": "2:3,output"}, "layers 0-1 and layers 4-11 are left over for beta, expected one run"),
    ],
)
def test_spans_that_do_not_fit_together_name_layer_and_member(spans: dict[str, str], expected: str) -> None:
    with pytest.raises(SpanError) as caught:
        place(spec_of(), members(GB, GB), spans)
    assert expected in str(caught.value)


def test_a_head_that_claims_the_last_layer_without_the_output_is_told_how_to_claim_it() -> None:
    with pytest.raises(SpanError) as caught:
        place(spec_of(), members(GB, GB), {"alpha": "8:11", "beta": "0:7"})
    assert caught.value.hint == "use 8:output for alpha"


def test_a_head_in_the_middle_is_refused() -> None:
    spans = {"alpha": "4:7,output", "beta": "0:3", "gamma": "8:11"}
    with pytest.raises(SpanError, match="the head, alpha, owns layers 4-7 in the middle"):
        place(spec_of(), members(GB, GB, GB), spans)


def test_a_peer_in_the_middle_cannot_own_the_output() -> None:
    spans = {"alpha": "0:3", "beta": "4:7,output", "gamma": "8:11"}
    with pytest.raises(
        SpanError, match=r"the output claimed by beta \(4:7,output\), expected the head, alpha"
    ) as caught:
        place(spec_of(), members(GB, GB, GB), spans)
    assert caught.value.hint == "use 0:3,output for alpha, or 8:output for gamma and no output for alpha"


def test_a_head_in_the_middle_is_refused_whoever_owns_the_output() -> None:
    spans = {"alpha": "4:7", "beta": "0:3", "gamma": "8:output"}
    with pytest.raises(SpanError, match="the head, alpha, owns layers 4-7 in the middle"):
        place(spec_of(), members(GB, GB, GB), spans)


def test_a_forbidden_cut_is_refused_with_its_reason() -> None:
    spec = replace(spec_of(), forbidden_cuts={4: "layer 4 reads the K/V of layer 3"})
    with pytest.raises(
        SpanError, match=r"between alpha and beta, before layer 4, .* reads the K/V of layer 3"
    ):
        place(spec, members(GB, GB), {"alpha": "0:3,output"})
    place(spec, members(GB, GB), {"alpha": "0:4,output"})


def test_cuts_are_moved_to_the_nearest_ones_that_the_model_allows() -> None:
    spec = replace(spec_of(), forbidden_cuts=dict.fromkeys(range(3, 12), "layer 9 reads the K/V of layer 2"))
    two = owned(place(spec, members(GB, GB)))
    assert [(start, end) for _, start, end, _, _ in two] == [(0, 2), (2, 12)]
    three = owned(place(spec, members(GB, GB, GB)))
    assert [(start, end) for _, start, end, _, _ in three] == [(0, 1), (1, 2), (2, 12)]
    with pytest.raises(SpanError, match="reads the K/V of layer 2"):
        place(spec, members(GB, GB, GB, GB))


def test_a_stage_that_cannot_fit_is_refused_with_both_numbers() -> None:
    # 36 layers of about 0.5 GB in float32
    spec = spec_of(36, hidden_size=3072, intermediate_size=9728, num_attention_heads=24, vocab_size=4096)
    layer = spec.layer_bytes(0, "float32")
    with pytest.raises(PlanError) as caught:
        place(spec, members(40 * GB, 8 * GB), {"alpha": "0:17,output", "beta": "18:35"})
    needed = (18 * layer + spec.kv_token_bytes(18, 36, "float32") * 16) / GB
    assert str(caught.value) == f"stage 1 on beta needs {needed:.1f} GB for layers 18-35 but has 8.0 GB"


def test_every_stage_that_does_not_fit_is_listed() -> None:
    with pytest.raises(
        PlanError, match=r"stage 0 on alpha needs .*; stage 1 on beta needs .* but has 1.0 kB"
    ):
        place(spec_of(), members(1000, 1000))


def test_a_shortage_smaller_than_a_digit_still_shows_two_numbers() -> None:
    spec = spec_of()
    spans = {"alpha": "0:5,output"}
    least = spec.weight_bytes(6, 12, embed=False, output=False, dtype="float32")
    least += 16 * spec.kv_token_bytes(6, 12, "float32")
    place(spec, members(GB, least), spans)
    with pytest.raises(PlanError) as caught:
        place(spec, members(GB, least - 1), spans)
    numbers = re.fullmatch(r"stage 1 on beta needs (.+) for layers 6-11 but has (.+)", str(caught.value))
    assert numbers is not None
    assert numbers[1] != numbers[2]


def test_layers_move_away_from_a_member_that_embedding_and_output_fill() -> None:
    spec = spec_of(vocab_size=20_000)
    ends = spec.embed_bytes("float32") + spec.output_bytes("float32")
    layer = spec.layer_bytes(0, "float32") + 16 * spec.kv_token_bytes(0, 1, "float32")
    room = ends + 3 * layer
    # equal members would have been given the cut by time already
    offers = [replace(offer, num_threads=i) for i, offer in enumerate(members(room, room))]
    placement = place(spec, offers)
    assert [(stage.start, stage.end) for stage in placement.stages] == [(0, 3), (3, 12)]


@pytest.mark.parametrize(
    ("offers", "expected"),
    [
        ([], "0 of 0 members are the head"),
        (members(GB, GB, head=9), "0 of 2 members are the head, expected exactly one"),
        ([MemberOffer("alpha", GB, True), MemberOffer("beta", GB, True)], "2 of 2 members are the head"),
        ([MemberOffer("alpha", GB, True), MemberOffer("alpha", GB)], "member alpha is listed twice"),
        (members(GB, 0), "beta offers 0 bytes of memory, expected more than 0"),
        (members(GB, GB, GB), "3 members cannot share 2 layers"),
    ],
)
def test_members_that_make_no_plan_are_refused(offers: list[MemberOffer], expected: str) -> None:
    with pytest.raises(PlanError, match=expected):
        place(spec_of(2), offers)


@given(st.lists(st.integers(10**5, 10**9), min_size=1, max_size=4), st.integers(1, 12), st.integers(0, 3))
def test_any_placement_covers_every_layer_once_or_is_refused(
    sizes: list[int], layers: int, head: int
) -> None:
    try:
        placement = place(spec_of(layers), members(*sizes, head=head % len(sizes)))
    except PlanError:
        return
    assert [i for s in placement.stages for i in range(s.start, s.end)] == list(range(layers))
    assert placement.route.complete
    assert sum(stage.output for stage in placement.stages) == 1


def test_bytes_are_shown_in_decimal_units() -> None:
    assert [format_bytes(n) for n in (0, 999, 1000, 9_100_000_000, 2 * 10**12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "9.1 GB",
        "2.0 TB",
    ]
