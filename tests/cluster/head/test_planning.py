"""Which plan comes after a loss, with integers alone."""

from __future__ import annotations

import msgspec
import pytest

from convoy.cluster.attestation.member_verifier import MemberVerifier
from convoy.cluster.head.planning import PlannedStages, Planner
from convoy.cluster.options import HeadOptions, MemberOptions
from convoy.config.kernels import held_form
from convoy.errors import Incompatible, PlanError
from convoy.model.checkpoints.source import ModelSource
from convoy.plan.memory.memory import stage_bytes
from convoy.plan.placement.modes import Predict
from convoy.plan.placement.parallel import Asked
from convoy.plan.placement.placement import Placement
from convoy.plan.report import report
from convoy.plan.span import Span
from convoy.plan.spec.sharding import rank_bytes
from convoy.wire.messages.control import Hello
from support.members import make_local_members, membership_of

SOURCE = ModelSource.resolve("demo")
NAMES = ("alpha", "beta", "gamma", "delta")
PLENTY = 1 << 32


def hello(
    memory_bytes: int = PLENTY, *, standby: bool = False, kernel: str = "exact-f32", bits: str = ""
) -> Hello:
    return Hello("test", ["float32"], [kernel], memory_bytes, 1, "test", standby, bits)


def planner(spans: dict[str, str] | None = None, kv_dtype: str = "auto") -> Planner:
    members = make_local_members(NAMES)
    options = HeadOptions(MemberOptions(), spans=spans, kv_dtype=kv_dtype)
    return Planner(
        membership_of(members[0]), SOURCE, options, MemberVerifier(lambda: members[0], MemberOptions())
    )


def bytes_for(first_layers: int) -> int:
    return stage_bytes(SOURCE.spec, Span(0, first_layers, True), "exact-f32") + 1000


def spans_of(proposal: object) -> dict[str, tuple[int, int]]:
    return {s.member: (s.start, s.end) for s in proposal.plan.stages}  # type: ignore[attr-defined]


def test_plan_ids_grow_even_where_the_clock_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = planner()
    monkeypatch.setattr("time.time_ns", lambda: 1000)
    first = plans.first({"alpha": hello(), "beta": hello()})
    assert first.plan.plan_id == 1000
    monkeypatch.setattr("time.time_ns", lambda: 5)
    again = plans.again({"alpha": hello()}, first.placement)
    assert again.plan.plan_id > 1000


def test_a_standby_gets_no_stage_at_the_start() -> None:
    first = planner().first({"alpha": hello(), "beta": hello(), "gamma": hello(standby=True)})
    assert first.members == {"alpha", "beta"}


def test_a_look_at_a_first_plan_counts_no_standby_and_leaves_the_running_plan_alone() -> None:
    plans = planner()
    plans.first({"alpha": hello(), "beta": hello()})
    plans.check_first({"alpha": hello(), "beta": hello()})
    with pytest.raises(PlanError, match="alpha needs"):
        plans.check_first({"alpha": hello(bytes_for(5)), "gamma": hello(standby=True)})
    assert plans.same_bits(), "the kernels of the running plan are still known"


def test_who_remains_holds_the_layers_before_a_standby_does() -> None:
    plans, all_hellos = planner(), {"alpha": hello(), "beta": hello(), "gamma": hello(standby=True)}
    first = plans.first(all_hellos)
    again = plans.again({"alpha": hello(), "gamma": hello(standby=True)}, first.placement)
    assert again.members == {"alpha"}


def test_a_standby_takes_exactly_the_place_of_the_lost_one() -> None:
    small = hello(bytes_for(5))
    plans = planner()
    first = plans.first({"alpha": small, "beta": hello(), "gamma": hello(standby=True)})
    again = plans.again({"alpha": small, "gamma": hello(standby=True)}, first.placement)
    before = spans_of(first)
    assert spans_of(again) == {"alpha": before["alpha"], "gamma": before["beta"]}


def test_a_standby_that_serves_is_no_standby_any_more() -> None:
    small = hello(bytes_for(5))
    plans = planner()
    first = plans.first({"alpha": small, "beta": hello(), "gamma": hello(standby=True)})
    again = plans.again({"alpha": small, "gamma": hello(standby=True)}, first.placement)
    here = {"alpha": small, "gamma": hello(standby=True), "delta": hello(standby=True)}
    assert spans_of(plans.again(here, again.placement)) == spans_of(again), "the ring broke, nobody is lost"


def test_given_spans_hold_where_all_whom_they_name_are_there() -> None:
    spans = {"alpha": "0:2,output", "beta": "3:6", "gamma": "7:11"}
    plans = planner(spans)
    all_three = {name: hello() for name in NAMES[:3]}
    first = plans.first(all_three)
    without = {"alpha": hello(), "beta": hello()}
    again = plans.again(without, first.placement)
    assert again.members == {"alpha", "beta"}
    back = plans.again(all_three, None)
    assert spans_of(back) == {"alpha": (0, 3), "beta": (3, 7), "gamma": (7, 12)}


def test_the_output_of_a_lost_peer_goes_to_the_head() -> None:
    plans = planner({"alpha": "0:3", "beta": "4:7", "gamma": "8:output"})
    first = plans.first({name: hello() for name in NAMES[:3]})
    assert first.plan.stages[-1].output
    again = plans.again({"alpha": hello(), "beta": hello()}, first.placement)
    assert [stage.member for stage in again.plan.stages if stage.output] == ["alpha"]


def test_a_slow_member_is_used_only_where_it_must_be() -> None:
    plans = planner()
    first = plans.first({name: hello() for name in NAMES[:3]})
    here = {name: hello() for name in NAMES[:3]}
    assert plans.again(here, first.placement, slow={"gamma"}).members == {"alpha", "beta"}
    tight = {"alpha": hello(bytes_for(5)), "gamma": hello()}
    assert plans.again(tight, first.placement, slow={"gamma"}).members == {"alpha", "gamma"}


def test_no_plan_says_why_those_that_remain_do_not_do() -> None:
    plans = planner()
    first = plans.first({"alpha": hello(bytes_for(5)), "beta": hello()})
    with pytest.raises(PlanError, match="alpha needs"):
        plans.again({"alpha": hello(bytes_for(5))}, first.placement)
    assert not plans.can_spare("beta", {"alpha": hello(bytes_for(5)), "beta": hello()}, first.placement)
    assert plans.can_spare("beta", {"alpha": hello(), "beta": hello()}, first.placement)


def test_a_member_that_would_change_the_kernel_is_not_used() -> None:
    plans = planner()
    small = hello(bytes_for(5))
    first = plans.first({"alpha": small, "beta": hello()})
    with pytest.raises(PlanError) as refused:
        plans.again({"alpha": small, "gamma": hello(kernel="plain-f32")}, first.placement)
    assert isinstance(refused.value.__cause__, Incompatible)


def test_a_standby_preloads_the_same_plan_with_itself_in_one_place() -> None:
    plans = planner()
    first = plans.first({"alpha": hello(), "beta": hello()})
    plan = plans.in_place_of(first.plan, "beta", "gamma", hello())
    assert [stage.member for stage in plan.stages] == ["alpha", "gamma"]
    assert plan.plan_id == first.plan.plan_id
    assert [stage.member for stage in first.plan.stages] == ["alpha", "beta"]


def test_who_computes_other_bits_than_the_head_is_told_once_by_name_and_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = "beta computes other bits than alpha: a text may change when layers move between them"
    hellos = {"alpha": hello(bits="aa"), "beta": hello(bits="bb"), "gamma": hello(bits="aa")}
    plans = planner()
    first = plans.first(hellos)
    assert "beta" in first.members
    assert not plans.same_bits()
    plans.again(hellos, first.placement)
    assert [record.message for record in caplog.records] == [told]
    plans.again(hellos | {"beta": hello(bits="cc")}, first.placement)
    assert [record.message for record in caplog.records] == [told, told]


def test_where_nothing_is_exact_nobody_asks_for_bits(caplog: pytest.LogCaptureFixture) -> None:
    plans = planner()
    plans.first({name: hello(kernel="plain-f32", bits="a" if name == "alpha" else "b") for name in NAMES})
    assert not caplog.records
    assert not plans.same_bits()


def test_layers_move_freely_between_members_of_the_same_bits() -> None:
    plans = planner()
    plans.first({name: hello(bits="aa") for name in NAMES})
    assert plans.same_bits()


@pytest.mark.parametrize("useless", [hello(0), hello(1000), hello(kernel="plain-f32"), hello(bytes_for(1))])
def test_a_member_of_little_use_keeps_nobody_from_taking_over(useless: Hello) -> None:
    plans, half = planner(), hello(bytes_for(8))
    first = plans.first({"alpha": half, "beta": half, "gamma": half})
    left = {"alpha": half, "beta": half, "delta": useless}
    again = plans.again(left, first.placement)
    assert {"alpha", "beta"} <= again.members
    assert plans.can_spare("gamma", {**left, "gamma": half}, first.placement)


def test_a_plan_with_more_members_and_less_room_is_none_that_a_running_one_is_left_for() -> None:
    plans = planner()
    running = plans.again({"alpha": hello(), "beta": hello()}, None).placement
    small = plans.again({"alpha": hello(), "beta": hello(), "gamma": hello(bytes_for(1))}, None)
    large = plans.again({"alpha": hello(), "beta": hello(), "gamma": hello()}, None)
    assert "gamma" in small.members & large.members
    assert not plans.keeps_room(running, small.placement)
    assert plans.keeps_room(running, large.placement)


def test_a_member_that_unpacks_gets_as_many_layers_as_fit_in_float32() -> None:
    memory_bytes, unpacked = bytes_for(9), held_form("exact-f32", unpacks=True)
    keeps = hello(memory_bytes)
    unpacks = msgspec.structs.replace(keeps, unpacks=True)
    start, end = spans_of(planner().first({"alpha": keeps, "beta": keeps}))["beta"]
    assert stage_bytes(SOURCE.spec, Span(start, end), unpacked) > memory_bytes
    mixed = planner().first({"alpha": keeps, "beta": unpacks})
    fewer = Span(*spans_of(mixed)["beta"])
    assert fewer.end - fewer.start < end - start
    assert stage_bytes(SOURCE.spec, fewer, unpacked) <= memory_bytes
    assert (mixed.plan.kernel, mixed.plan.kernels) == ("exact-f32", [])
    shown = report(mixed.placement).stages
    assert [stage.unpacks for stage in shown] == [[], ["beta"]]
    weights = SOURCE.spec.weight_bytes(fewer.start, fewer.end, embed=False, output=False, dtype=unpacked)
    assert shown[1].weight_bytes == weights


def test_a_rank_that_unpacks_sets_the_size_of_all_slices_of_its_stage() -> None:
    unpacks = msgspec.structs.replace(hello(), unpacks=True)
    found = together("tensor").first({"alpha": hello(), "beta": unpacks}).placement
    (stage,) = report(found).stages
    whole = Span(0, SOURCE.spec.num_layers, True)
    assert stage.weight_bytes == rank_bytes(SOURCE.spec, whole, held_form("exact-f32", unpacks=True), 2)
    assert stage.unpacks == ["beta"]


def cuda(memory_bytes: int = PLENTY, *, standby: bool = False) -> Hello:
    dtypes, device = ["float32", "bfloat16"], "cuda:0 (fake)"
    return Hello("test", dtypes, ["cuda-bf16"], memory_bytes, 1, "test", standby, device=device)


def host(kernels: tuple[str, ...] = ("exact-f32", "plain-f32")) -> Hello:
    return Hello("test", ["float32", "bfloat16"], list(kernels), PLENTY, 1, "test")


def test_a_route_of_hosts_and_devices_has_a_kernel_for_each_and_hidden_states_in_bfloat16() -> None:
    plan = planner().first({"alpha": host(), "beta": cuda(), "gamma": host(("plain-f32",))}).plan
    kernels = {stage.member: plan.kernel_of(place) for place, stage in enumerate(plan.stages)}
    assert kernels == {"alpha": "plain-f32", "beta": "cuda-bf16", "gamma": "plain-f32"}
    assert (plan.kernel, plan.activation_dtype) == ("mixed", "bfloat16")


def test_a_route_of_one_kind_names_one_kernel() -> None:
    plans = planner()
    plan = plans.first({"alpha": cuda(), "beta": cuda()}).plan
    assert (plan.kernel, plan.kernels, plan.activation_dtype) == ("cuda-bf16", [], "bfloat16")
    assert not plans.same_bits()
    plan = planner().first({"alpha": host(), "beta": host()}).plan
    assert (plan.kernel, plan.kernels, plan.activation_dtype) == ("exact-f32", [], "float32")


def test_who_asks_for_exact_mode_by_name_gets_no_device_beside_it() -> None:
    with pytest.raises(Incompatible, match="alpha asks for the kernel exact-f32, but beta can run cuda-bf16"):
        planner().first({"alpha": host(("exact-f32",)), "beta": cuda()})


def test_a_plan_says_in_which_dtype_all_hold_k_and_v() -> None:
    plan = planner(kv_dtype="bf16").first({"alpha": host(), "beta": cuda()}).plan
    assert plan.kv_dtype == "bf16"
    plans = planner(kv_dtype="q8")
    first = plans.first({"alpha": host(), "beta": host()})
    assert first.plan.kv_dtype == "q8"
    assert {group.kv_dtype for group in first.placement.spec.cache_groups} == {"q8"}
    # A device cannot take over, and keeps no host from doing so.
    assert plans.again({"alpha": host(), "gamma": cuda()}, first.placement).members == {"alpha"}


@pytest.mark.parametrize("kv_dtype", ["f32", "q8", "f16"])
def test_a_dtype_of_kv_that_a_member_does_not_hold_is_refused_by_its_name(kv_dtype: str) -> None:
    told = f"kv_dtype is {kv_dtype}, but beta runs cuda-bf16, which holds K/V as bf16"
    with pytest.raises(Incompatible, match=told):
        planner(kv_dtype=kv_dtype).first({"alpha": host(), "beta": cuda()})


def test_a_device_joins_no_text_that_hosts_began_but_hosts_go_on_for_a_device() -> None:
    plans = planner()
    exact = plans.first({"alpha": host(), "beta": host()})
    assert plans.again({"alpha": host(), "gamma": cuda()}, exact.placement).members == {"alpha"}
    assert plans.again({"alpha": host(), "gamma": cuda()}, None).members == {"alpha"}
    plans = planner()
    mixed = plans.first({"alpha": host(), "beta": cuda()})
    again = plans.again({"alpha": host(), "gamma": host()}, mixed.placement)
    assert (again.plan.kernel, again.plan.kernels) == ("exact-f32", [])
    assert not plans.same_bits()


def test_a_device_holds_twice_the_layers_of_a_host_in_float32_in_the_same_memory() -> None:
    need = stage_bytes(SOURCE.spec, Span(0, 12, True), "float32")
    with pytest.raises(PlanError, match="needs"):
        planner().first({"alpha": hello(need // 2 + 10_000, kernel="plain-f32")})
    plan = planner().first({"alpha": cuda(need // 2 + 10_000)}).plan
    assert plan.kernel == "cuda-bf16"


def test_a_standby_of_another_kind_preloads_with_its_own_kernel() -> None:
    plans = planner()
    first = plans.first({"alpha": host(), "beta": cuda()})
    plan = plans.in_place_of(first.plan, "beta", "gamma", host())
    assert (plan.kernel, plan.kernels) == ("exact-f32", [])
    plan = plans.in_place_of(first.plan, "alpha", "gamma", cuda(standby=True))
    assert (plan.kernel, plan.kernels) == ("cuda-bf16", [])


def together(asked: Asked = "auto", predict: Predict | None = None, ranks: int | None = None) -> Planner:
    members = make_local_members(NAMES)
    options = HeadOptions(MemberOptions(), parallel=asked, ranks=ranks)
    verifier = MemberVerifier(lambda: members[0], MemberOptions())
    return Planner(membership_of(members[0]), SOURCE, options, verifier, predict=predict)


def faster_as_ranks(placement: Placement) -> float:
    return 0.01 if placement.mode == "tensor" else 0.02


def shape(proposal: PlannedStages) -> list[tuple[str, ...]]:
    return [tuple(stage.holders) for stage in proposal.plan.stages]


def rounded(*names: str) -> dict[str, Hello]:
    return {name: hello(kernel="plain-f32") for name in names}


def test_members_are_a_pipeline_in_exact_mode_unless_ranks_were_asked_for() -> None:
    exact = {name: hello() for name in NAMES[:2]}
    found = together(predict=faster_as_ranks).first(exact)
    assert shape(found) == [("alpha",), ("beta",)]
    assert "promises the same bits" in found.placement.reason
    assert shape(together("tensor").first(exact)) == [("alpha", "beta")]
    assert together("tensor").first(exact).members == {"alpha", "beta"}
    assert shape(together("single").first(exact)) == [("alpha",)]


def test_after_a_loss_fewer_ranks_or_a_lone_member_go_on_and_all_are_used_once_they_are_back() -> None:
    plans = together(predict=faster_as_ranks)
    first = plans.first(rounded(*NAMES))
    assert shape(first) == [NAMES]
    three = plans.again(rounded("alpha", "gamma", "delta"), first.placement)
    assert shape(three) == [("alpha", "gamma"), ("delta",)]  # three cannot share eight heads
    two = plans.again(rounded("alpha", "delta"), three.placement)
    assert shape(two) == [("alpha", "delta")]
    alone = plans.again(rounded("alpha"), two.placement)
    assert (shape(alone), alone.placement.mode) == ([("alpha",)], "single")
    assert shape(plans.again(rounded(*NAMES), None)) == [NAMES]


def test_fewer_ranks_than_were_asked_for_do_after_a_loss_and_not_at_the_start() -> None:
    plans = together("tensor", ranks=4)
    with pytest.raises(PlanError, match="4 ranks for each stage were asked for, and there are 2 members"):
        plans.first(rounded("alpha", "beta"))
    first = plans.first(rounded(*NAMES))
    assert shape(plans.again(rounded("alpha", "beta"), first.placement)) == [("alpha", "beta")]


def test_ranks_that_could_not_begin_are_a_pipeline_until_others_are_here() -> None:
    plans, both = together(predict=faster_as_ranks), rounded("alpha", "beta")
    first = plans.first(both)
    assert shape(first) == [("alpha", "beta")]
    plans.tensor_failed(both, "beta said nothing within 10 s")
    for before in (first.placement, None):
        again = plans.again(both, before)
        assert shape(again) == [("alpha",), ("beta",)]
        assert "the collective did not come up: beta said nothing" in again.placement.reason
    assert plans.can_spare("beta", both, first.placement)
    assert shape(plans.again(both, None)) == [("alpha",), ("beta",)], "who asks whether is no change"
    assert shape(plans.again(rounded("alpha"), again.placement)) == [("alpha",)]
    assert shape(plans.again(both, None)) == [("alpha", "beta")]


def test_ranks_that_were_asked_for_and_could_not_begin_are_an_error() -> None:
    plans, both = together("tensor"), rounded("alpha", "beta")
    plans.first(both)
    plans.tensor_failed(both, "beta said nothing within 10 s")
    with pytest.raises(PlanError, match="was asked for, and cannot be: the collective did not come up"):
        plans.again(both, None)


def test_a_member_with_ranks_of_its_own_is_no_rank_of_others() -> None:
    both = rounded("alpha", "beta")
    both["beta"] = msgspec.structs.replace(both["beta"], device="cpu+cpu")
    found = together(predict=faster_as_ranks).first(both)
    assert shape(found) == [("alpha",), ("beta",)]
    assert "beta has ranks of its own, on cpu+cpu" in found.placement.reason


def test_stages_of_ranks_stay_as_they_were_where_all_are_there_and_keep_their_reason() -> None:
    plans, both = together(predict=faster_as_ranks), rounded("alpha", "beta")
    first = plans.first(both)
    again = plans.again(both, first.placement)
    assert shape(again) == shape(first)
    assert again.placement.reason == first.placement.reason
    assert again.placement.reason.startswith("predicted faster")


def test_a_standby_takes_the_place_of_a_lost_rank() -> None:
    plans = together("tensor")
    tight = {name: hello(kernel="plain-f32", memory_bytes=rank_room()) for name in ("alpha", "beta")}
    waiting = {"gamma": hello(kernel="plain-f32", standby=True)}
    first = plans.first(tight)
    again = plans.again({"alpha": tight["alpha"], **waiting}, first.placement)
    assert shape(again) == [("alpha", "gamma")]
    kept = plans.in_place_of(first.plan, "beta", "gamma", waiting["gamma"])
    assert kept.stages[0].ranks == ["alpha", "gamma"]


def rank_room() -> int:
    whole = Span(0, SOURCE.spec.num_layers, True)
    return stage_bytes(SOURCE.spec, whole, "plain-f32", 2) + 1000
