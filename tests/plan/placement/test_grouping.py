"""Stages of several ranks: their members, the bound of the smallest, and their place in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.errors import PlanError, SpanError
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.offer import MemberOffer
from convoy.plan.placement.grouping import best_world_size, in_groups
from convoy.plan.placement.modes import choose_placement, find_placements
from convoy.plan.placement.parallel import PredictedSteps
from convoy.plan.placement.placement import Placement, place
from convoy.plan.placement.rules import satisfies
from convoy.plan.report import report
from convoy.plan.span import Span, split_key
from convoy.trust.evidence.policy import PlacementRule
from plan.placement.test_placement import GB, members, spec_of

SPEC = spec_of()
FAST = PredictedSteps(0.02, 0.01)


def stages(placement: Placement) -> list[tuple[list[str], int, int]]:
    return [(stage.holders, stage.start, stage.end) for stage in placement.stages]


def rounded(*memory_bytes: int) -> list[MemberOffer]:
    return [replace(member, kernel="plain-f32") for member in members(*memory_bytes)]


def faster(placement: Placement) -> float:
    return 0.01 if placement.mode == "tensor" else 0.02


def slower(placement: Placement) -> float:
    return 0.02 if placement.mode == "tensor" else 0.01


def test_two_members_make_one_stage_and_four_make_as_many_as_their_ranks_allow() -> None:
    two = find_placements(SPEC, members(GB, GB)).of("tensor")
    assert stages(two) == [(["alpha", "beta"], 0, 12)]
    four = members(GB, GB, GB, GB)
    assert stages(find_placements(SPEC, four).of("tensor")) == [(["alpha", "beta", "gamma", "delta"], 0, 12)]
    pairs = find_placements(SPEC, four, ranks=2).of("tensor")
    assert stages(pairs) == [(["alpha", "beta"], 0, 6), (["gamma", "delta"], 6, 12)]
    assert pairs.stages[0].embed
    assert pairs.stages[0].output


def test_who_is_left_over_has_a_stage_alone() -> None:
    three = find_placements(SPEC, members(GB, GB, GB)).of("tensor")  # four heads, which three cannot share
    assert [holders for holders, _, _ in stages(three)] == [["alpha", "beta"], ["gamma"]]
    assert three.route.text.startswith("alpha+beta 0:7,output -> gamma 8:11") or three.mode == "tensor"


def test_the_head_is_the_first_rank_wherever_the_roster_lists_it() -> None:
    found = find_placements(SPEC, members(GB, GB, GB, GB, head=2), ranks=2).of("tensor")
    assert stages(found)[0][0] == ["gamma", "alpha"]
    with pytest.raises(SpanError, match="the head, alpha, is not the first of beta\\+alpha") as raised:
        place(SPEC, members(GB, GB), {"beta+alpha": "0:output"})
    assert raised.value.hint == "write alpha+beta"


def test_spans_may_be_for_groups_and_for_single_members() -> None:
    found = place(SPEC, members(GB, GB, GB), {"alpha+beta": "0:7,output", "gamma": "8:11"})
    assert stages(found) == [(["alpha", "beta"], 0, 8), (["gamma"], 8, 12)]
    assert found.mode == "tensor"
    assert found.holders == ("alpha", "beta", "gamma")
    assert found.route.text == "alpha+beta 0:7,output -> gamma 8:11 -> alpha"
    rest = place(SPEC, members(GB, GB, GB), {"alpha+beta": "0:7,output"})
    assert stages(rest) == stages(found)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({"alpha+beta": "0:5,output", "beta": "6:11"}, "two spans are for beta"),
        ({"alpha+delta": "0:output"}, "a span is for delta, expected a member: alpha, beta"),
        ({"alpha+alpha": "0:output"}, "expected NAME or NAME\\+NAME with names that differ"),
    ],
)
def test_spans_of_groups_that_cannot_be_are_refused(spans: dict[str, str], message: str) -> None:
    with pytest.raises(SpanError, match=message):
        place(SPEC, members(GB, GB), spans)


def test_a_joined_name_is_read_with_spaces_and_without() -> None:
    assert split_key("alpha + beta") == ("alpha", "beta")
    assert split_key("alpha") == ("alpha",)


def test_the_smallest_rank_bounds_the_stage_and_the_error_has_both_numbers() -> None:
    least = stage_bytes(SPEC, Span(0, 12, True), "float32", 2)
    assert least < stage_bytes(SPEC, Span(0, 12, True), "float32")
    place(SPEC, members(GB, least), {"alpha+beta": "0:output"})
    with pytest.raises(PlanError, match=r"needs .* on each rank for its part of layers 0-11 but beta has"):
        place(SPEC, members(GB, least - 1), {"alpha+beta": "0:output"})


def test_ranks_of_a_stage_run_one_kernel() -> None:
    mixed = [members(GB)[0], replace(members(GB, GB)[1], kernel="plain-f32")]
    with pytest.raises(PlanError, match="alpha would run float32 and beta plain-f32, expected one kernel"):
        place(SPEC, mixed, {"alpha+beta": "0:output"})


def test_members_on_cuda_hold_whole_layers() -> None:
    cards = [replace(member, kernel="cuda-bf16") for member in members(GB, GB)]
    found = choose_placement("auto", find_placements(SPEC, cards), predict=faster)
    assert (found.mode, found.reason) == (
        "pipeline",
        "alpha runs cuda-bf16, and ranks of a stage compute on CPUs or MLX",
    )


def test_members_on_mlx_share_layers_if_that_is_asked_for_and_never_by_a_prediction() -> None:
    macs = [replace(member, kernel="mlx-bf16") for member in members(GB, GB)]
    modes = find_placements(SPEC, macs)
    assert choose_placement("tensor", modes).mode == "tensor"
    found = choose_placement("auto", modes, predict=lambda _: pytest.fail("nothing is predicted"))
    assert found.mode == "pipeline"
    assert "not measured on any Mac" in str(found.reason)


def test_a_member_on_mlx_and_one_on_its_processor_hold_whole_layers() -> None:
    mixed = [replace(members(GB)[0], kernel="exact-f32"), replace(members(GB, GB)[1], kernel="mlx-bf16")]
    with pytest.raises(PlanError, match="alpha would run exact-f32 and beta mlx-bf16") as refused:
        place(SPEC, mixed, {"alpha+beta": "0:output"})
    assert "--parallel pipeline" in str(refused.value.hint)


def test_as_many_ranks_as_can_be_and_never_more_than_were_asked_for() -> None:
    assert best_world_size(SPEC, 4) == 4
    assert best_world_size(SPEC, 3) == 2
    assert best_world_size(SPEC, 4, 2) == 2
    assert best_world_size(SPEC, 3, 4, fewer=True) == 2
    with pytest.raises(PlanError, match="4 ranks for each stage were asked for, and there are 3 members"):
        best_world_size(SPEC, 3, 4)
    with pytest.raises(PlanError, match="has 4 heads in layers of full, which 3 ranks cannot share alike"):
        best_world_size(SPEC, 3, 3)


def test_all_ranks_of_a_stage_that_embeds_or_samples_see_token_ids() -> None:
    found = find_placements(SPEC, members(GB, GB, GB, GB), ranks=2).of("tensor")
    assert found.route.token_id_members == ("alpha", "beta")
    assert found.route.without({"beta"}).missing == "layers 0-5 and the output"


def test_a_rule_binds_every_rank() -> None:
    rule = PlacementRule(True, False, 0, 0, None, ("alpha",))
    group = in_groups(members(GB, GB), 2)[0]
    assert satisfies(rule, members(GB)[0])
    assert not satisfies(rule, group)
    with pytest.raises(SpanError, match="rule 1: the embedding must be on alpha, not on beta"):
        place(SPEC, members(GB, GB), {"alpha+beta": "0:output"}, [rule])


def test_left_to_itself_the_faster_way_is_taken_with_its_reason() -> None:
    modes = find_placements(SPEC, rounded(GB, GB))
    taken = choose_placement("auto", modes, predict=faster)
    assert (taken.mode, taken.reason[:16]) == ("tensor", "predicted faster")
    assert choose_placement("auto", modes, predict=slower).mode == "pipeline"
    assert choose_placement("auto", modes).mode == "pipeline"
    assert choose_placement("single", modes).mode == "single"
    assert choose_placement("tensor", modes, predict=slower).mode == "tensor"


def test_a_head_alone_that_was_asked_for_and_has_no_room_is_an_error_that_names_the_others() -> None:
    whole_bytes = stage_bytes(SPEC, Span(0, SPEC.num_layers, True), "plain-f32")
    modes = find_placements(SPEC, rounded(whole_bytes - 1, GB))
    with pytest.raises(
        PlanError, match=r"single was asked for, and cannot be: .* needs .* but has"
    ) as raised:
        choose_placement("single", modes)
    assert raised.value.hint == "with --parallel auto or pipeline these members hold the model together"


def test_nothing_is_predicted_where_it_does_not_decide() -> None:
    def never(_placement: Placement) -> float:
        raise AssertionError("asked for a prediction")

    exact = [replace(member, kernel="exact-f32") for member in members(GB, GB)]
    assert "same bits" in choose_placement("auto", find_placements(SPEC, exact), predict=never).reason
    modes = find_placements(SPEC, rounded(GB, GB))
    assert choose_placement("tensor", modes, predict=never).mode == "tensor"
    assert choose_placement("auto", modes, predict=never, collective="beta is silent").mode == "pipeline"


def test_spans_say_what_is_meant() -> None:
    whole = find_placements(SPEC, rounded(GB, GB), {"alpha": "0:5,output", "beta": "6:11"})
    assert "joined names" in choose_placement("auto", whole, predict=faster).reason
    with pytest.raises(PlanError, match="the spans give members whole layers"):
        choose_placement("tensor", whole)
    joint = find_placements(SPEC, rounded(GB, GB), {"alpha+beta": "0:output"})
    assert choose_placement("auto", joint).reason == "asked for: a span is for several ranks"
    with pytest.raises(SpanError, match="pipeline was asked for, and a span is for several ranks"):
        choose_placement("pipeline", joint)
    with pytest.raises(PlanError, match="the collective did not come up: beta is silent"):
        choose_placement("auto", joint, collective="beta is silent")


def test_a_model_that_cannot_be_shared_is_a_pipeline_with_its_reason() -> None:
    odd = spec_of(num_attention_heads=1, hidden_size=64)
    found = choose_placement("auto", find_placements(odd, rounded(GB, GB)), predict=faster)
    assert found.mode == "pipeline"
    assert "has 1 heads in layers of full, which 2 ranks cannot share alike" in found.reason


def test_a_report_has_what_each_rank_holds() -> None:
    found = report(find_placements(SPEC, members(GB, GB)).of("tensor"))
    stage = found.stages[0]
    whole = report(place(SPEC, members(GB))).stages[0]
    assert stage.ranks == ["alpha", "beta"]
    assert 0.5 <= stage.weight_share < 0.6
    assert stage.weight_bytes == round(whole.weight_bytes * stage.weight_share)
    assert stage.kv_bytes_per_token * 2 == whole.kv_bytes_per_token
    assert stage.max_kv_tokens > whole.max_kv_tokens
    assert found.peers_seeing_token_ids == ["beta"]
