"""Predicted rates, by numbers that a person can check."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from convoy.plan.placement.modes import find_placements
from convoy.plan.placement.placement import Placement, place
from convoy.plan.rates.compare import compare
from convoy.plan.rates.rates import Links, StepLoad, Workload, all_reduce_s, predict, stage_time
from convoy.plan.spec.model import ModelSpec
from convoy.plan.speed import Speed
from convoy.wire.messages.control import StageAssignment
from plan.placement.test_placement import GB, members, spec_of
from plan.spec.test_weights import moe

SPEC = spec_of()
FAST = Speed(1e12, 1e15)
NEAR = Links(1e-6, bytes_per_s=1e12)


def two(spec: ModelSpec = SPEC) -> Placement:
    return place(spec, members(8 * GB, 8 * GB))


def names(placement: Placement) -> list[str]:
    return [stage.member for stage in placement.stages]


def held_bytes(spec: ModelSpec, stage: StageAssignment) -> int:
    return spec.weight_bytes(stage.start, stage.end, embed=False, output=stage.output, dtype="float32")


def test_one_sequence_takes_every_stage_and_every_hop_in_turn() -> None:
    placement = two()
    stages = placement.stages
    speed = Speed(1e9, 1e15)
    found = predict(
        placement, dict.fromkeys(names(placement), speed), Links(2e-3, 1e12), Workload(context=64)
    )
    read = [
        held_bytes(SPEC, stage) + SPEC.kv_bytes(stage.start, stage.end, 64, "float32") for stage in stages
    ]
    assert found.decode.step_s == pytest.approx(sum(read) / 1e9 + 2e-3, rel=1e-3)
    assert found.decode.tokens_per_s == pytest.approx(1 / found.decode.step_s)


def test_the_limit_is_named_whatever_it_is() -> None:
    placement = two()
    head, peer = names(placement)
    slow = predict(placement, {head: FAST, peer: Speed(1e6, 1e15)}, NEAR, Workload())
    assert slow.decode.limit == slow.decode_batch.limit == f"{peer}'s memory bandwidth"
    busy = predict(placement, {head: Speed(1e12, 1e9), peer: FAST}, NEAR, Workload())
    assert busy.prefill.limit == f"{head}'s matrix products"
    far = Links(1e-6, 1e12, {frozenset((head, peer)): 0.2})
    assert predict(placement, {head: FAST, peer: FAST}, far, Workload()).decode.limit.startswith(
        "the hop from"
    )


def test_a_batch_in_flight_goes_at_the_pace_of_the_slowest_stage() -> None:
    placement = two()
    speeds = dict.fromkeys(names(placement), Speed(1e9, 1e15))
    found = predict(placement, speeds, NEAR, Workload(context=64, batch=8))
    bandwidth = speeds[names(placement)[0]]
    slowest = max(
        stage_time(SPEC, stage, "float32", bandwidth, StepLoad(4, 64)).total_s for stage in placement.stages
    )
    assert found.decode_batch.tokens_per_s == pytest.approx(4 / slowest, rel=1e-3)
    assert found.decode_batch.batch == 8
    waiting = predict(placement, speeds, Links(1.0, 1e12), Workload(context=64, batch=8))
    assert waiting.decode_batch.tokens_per_s == pytest.approx(8, rel=0.02), "8 come round in a second"


def test_fewer_sequences_than_stages_leave_stages_idle() -> None:
    placement = place(SPEC, members(8 * GB, 8 * GB, 8 * GB))
    speeds = dict.fromkeys(names(placement), Speed(1e9, 1e15))
    found = predict(placement, speeds, NEAR, Workload(batch=1))
    assert found.decode_batch.tokens_per_s == pytest.approx(found.decode.tokens_per_s, rel=1e-6)


def test_a_mixture_of_experts_reads_what_its_token_uses() -> None:
    spec = moe()
    placement = two(spec)
    stages, speed = placement.stages, Speed(1e9, 1e15, layer_s=7e-3)
    lone, many = (
        [stage_time(spec, stage, "float32", speed, StepLoad(num_rows, 0)) for stage in stages]
        for num_rows in (1, 1000)
    )
    held = sum(held_bytes(spec, stage) for stage in stages)
    assert sum(time.reading_s for time in lone) * 1e9 < 0.7 * held
    assert sum(time.reading_s for time in many) * 1e9 == pytest.approx(held), "some token goes to each"
    assert sum(time.layers_s for time in lone) < 0.7 * sum(time.layers_s for time in many)


def test_seconds_grow_with_rows_as_they_were_measured() -> None:
    speed = Speed(1e9, 256e9, few_flop_per_s=16e9)
    num_bytes, elements = 4e6, 1e6
    assert sum(speed.linear_s(1, num_bytes, elements)) == pytest.approx(4e-3), "done when all is read"
    # 16 rows take 2 ms of products, which reading leaves; 256 take 2 ms too: nothing grows
    assert sum(speed.linear_s(16, num_bytes, elements)) == pytest.approx(4e-3)
    slow = Speed(1e9, 64e9, few_flop_per_s=4e9)  # 8 ms for 16 rows, and for 256
    assert sum(slow.linear_s(16, num_bytes, elements)) == pytest.approx(8e-3)
    assert sum(slow.linear_s(8.5, num_bytes, elements)) == pytest.approx(6e-3), "halfway from 1 to 16"
    assert sum(slow.linear_s(136, num_bytes, elements)) == pytest.approx(8e-3)
    assert sum(slow.linear_s(512, num_bytes, elements)) == pytest.approx(16e-3)
    told = Speed(1e9, 64e9)  # by two numbers alone: whichever is longer
    assert sum(told.linear_s(16, num_bytes, elements)) == pytest.approx(4e-3)
    assert sum(told.linear_s(512, num_bytes, elements)) == pytest.approx(16e-3)


def test_what_every_layer_costs_limits_a_small_model() -> None:
    placement = two()
    own = Speed(1e12, 1e15, layer_s=1e-3, step_s=2e-3)
    found = predict(placement, dict.fromkeys(names(placement), own), NEAR, Workload())
    linears = sum(matrix.count for matrix in SPEC.layers[0].each.linears)
    expected = SPEC.num_layers * linears / 7 * 1e-3 + 2 * 2e-3
    assert found.decode.step_s == pytest.approx(expected, rel=1e-2)
    assert found.decode.limit.endswith("'s own time for each layer")


def test_a_chunk_takes_the_hosts_time_for_its_starts_where_the_device_is_faster() -> None:
    stage = two().stages[0]
    layers = stage.end - stage.start

    def chunk_s(speed: Speed) -> float:
        return stage_time(SPEC, stage, "cuda-bf16", speed, StepLoad(64, 0, is_chunk=True)).total_s

    waits = Speed(1e15, 1e18, layer_s=1e-5, row_s=1e-6, starts_s=1e-3)
    assert chunk_s(waits) == pytest.approx(layers * 1e-3)
    slow = Speed(1e15, 1e6, layer_s=1e-5, row_s=1e-6, starts_s=1e-3)
    assert chunk_s(slow) == pytest.approx(chunk_s(Speed(1e15, 1e6)))


CARD = Speed(1e15, 1e18, row_s=1e-4, step_s=2e-3, starts_s=1e-3)


WHOLE = StageAssignment("box", 0, SPEC.num_layers, embed=True, output=True)


def card_s(
    load: StepLoad, speed: Speed = CARD, stage: StageAssignment = WHOLE, spec: ModelSpec = SPEC
) -> float:
    return stage_time(spec, stage, "cuda-bf16", speed, load).total_s


def test_a_card_with_the_whole_model_takes_the_longer_of_its_time_and_its_hosts() -> None:
    slow = replace(CARD, layer_s=7e-3)
    computing = card_s(StepLoad(3, 0), replace(slow, step_s=0, row_s=0))
    assert card_s(StepLoad(3, 0)) == pytest.approx(2e-3 + 2 * 1e-4), "the host prepares three rows"
    assert computing > card_s(StepLoad(3, 0))
    assert card_s(StepLoad(3, 0), slow) == pytest.approx(computing)


def test_a_card_that_the_engine_does_not_feed_takes_its_time_and_its_hosts() -> None:
    slow = replace(CARD, layer_s=7e-3)
    without_host, load = replace(slow, step_s=0, row_s=0), StepLoad(3, 0)
    ranks = msgspec.structs.replace(WHOLE, ranks=["box", "far"])
    windows = spec_of(model_type="mistral", sliding_window=32, num_key_value_heads=4)
    states = spec_of(model_type="qwen3_5_text")
    whole = msgspec.structs.replace(WHOLE, end=states.num_layers)
    cases = [*((stage, SPEC) for stage in [*two().stages, ranks]), (WHOLE, windows), (whole, states)]
    for stage, spec in cases:
        computing = card_s(load, without_host, stage, spec)
        assert card_s(load, slow, stage, spec) == pytest.approx(computing + 2e-3 + 2 * 1e-4)


def test_a_prompts_first_chunk_alone_waits_for_its_preparation() -> None:
    layers = SPEC.num_layers
    slow = replace(CARD, flop_per_s=1e6, attention_flop_per_s=1e18)
    load = StepLoad(64, 0, is_chunk=True)
    computing = card_s(load, replace(slow, step_s=0, starts_s=0, row_s=0))
    assert card_s(load, slow) == pytest.approx(computing)
    assert card_s(replace(load, follows=False), slow) == pytest.approx(computing + 2e-3)
    assert card_s(load) == card_s(replace(load, follows=False)) == pytest.approx(2e-3 + layers * 1e-3)
    placement = place(SPEC, members(80 * GB))
    rates = [
        predict(placement, {names(placement)[0]: slow}, NEAR, Workload(context=64 * n, chunk=64)).prefill
        for n in (1, 4)
    ]
    assert rates[0].tokens_per_s == pytest.approx(64 / (computing + 2e-3), rel=1e-3)
    assert rates[1].tokens_per_s == pytest.approx(256 / (4 * computing + 2e-3), rel=1e-3)


def test_a_card_that_waits_for_its_host_is_limited_by_it() -> None:
    placement = place(SPEC, members(80 * GB))
    found = predict(placement, {names(placement)[0]: CARD}, NEAR, Workload())
    assert found.decode.limit == f"{names(placement)[0]}'s host that prepares steps"


def test_a_prompt_takes_longer_the_more_is_behind_its_chunks() -> None:
    placement = two()
    speeds = dict.fromkeys(names(placement), Speed(1e12, 1e12, attention_flop_per_s=1e9))
    short, long = (
        predict(placement, speeds, NEAR, Workload(context=context, chunk=64)).prefill for context in (64, 192)
    )
    (group,) = SPEC.cache_groups
    layers = max(stage.end - stage.start for stage in placement.stages)
    flop = 2 * 64 * 64 * group.num_heads * 2 * group.head_dim * layers  # 64 keys in the middle of the prompt
    assert long.step_s - short.step_s == pytest.approx(flop / 1e9, rel=1e-2)
    assert short.batch == long.batch == 64


def test_a_prompt_of_few_chunks_leaves_stages_idle_at_its_ends() -> None:
    spec = spec_of()
    alone, both = place(spec, members(8 * GB)), two(spec)
    speeds = dict.fromkeys(("alpha", "beta"), Speed(1e15, 1e9))
    for num_chunks in (1, 4, 100):
        load = Workload(context=64 * num_chunks, chunk=64)
        one, pair = (predict(placement, speeds, NEAR, load).prefill for placement in (alone, both))
        assert one.tokens_per_s == pytest.approx(64 / one.step_s)
        even = 2 * num_chunks / (num_chunks + 1)  # of as long stages; these are nearly so
        assert pair.tokens_per_s / one.tokens_per_s == pytest.approx(
            even * one.step_s / pair.step_s / 2, rel=0.1
        )


def test_a_speed_is_told_in_the_words_in_which_it_is_printed() -> None:
    speed = Speed(17.4e9, 107e9, 74.4e9, 5.24e9, 64.8e9, 431e-6, 21.8e-6, 444e-6)
    assert speed.text() == "17.4,107,74.4,5.24,64.8,0.431,21.8,0.444"
    again = Speed.from_numbers([float(number) for number in speed.text().split(",")])
    assert [getattr(again, name) for name in again.__dataclass_fields__] == pytest.approx(
        [getattr(speed, name) for name in speed.__dataclass_fields__]
    )
    assert Speed(17.4e9, 107e9).text() == "17.4,107"
    assert Speed.from_numbers([17.4, 107]) == Speed(17.4e9, 107e9)


def test_what_was_not_measured_is_said() -> None:
    placement = two()
    head, peer = names(placement)
    guessed = Speed(1e9, 1e12, assumed="as fast as this machine")
    found = predict(placement, {head: FAST, peer: guessed}, Links(5e-4), Workload())
    assert found.assumed[0] == f"that {peer} is as fast as this machine"
    assert found.assumed[1] == f"a round trip of 0.5 ms: {head} to {peer}, {peer} to {head}"
    told = Links(5e-4, by_pair={frozenset((head, peer)): 1e-3})
    assert predict(placement, {head: FAST, peer: FAST}, told, Workload()).assumed == [
        "wires that carry 100 MB/s"
    ]


def test_ranks_halve_what_is_read_and_pay_two_sums_for_each_layer() -> None:
    alone, joint = (
        place(SPEC, members(8 * GB)),
        place(SPEC, members(8 * GB, 8 * GB), {"alpha+beta": "0:output"}),
    )
    speeds, links = dict.fromkeys(("alpha", "beta"), Speed(1e9, 1e15)), Links(2e-4, 1e12)
    load = Workload(context=64)
    whole, shared = (predict(one, speeds, links, load).decode.step_s for one in (alone, joint))
    sums = 2 * SPEC.num_layers + 1 + 1  # the embedding, and logits at the end
    assert shared == pytest.approx(whole / 2 + sums * 1e-4, rel=0.02)
    near = predict(joint, speeds, Links(1e-9, 1e15), load).decode
    assert near.step_s == pytest.approx(whole / 2, rel=0.02)
    assert near.limit == "alpha+beta's memory bandwidth"


def test_the_slowest_rank_sets_the_pace_of_its_stage() -> None:
    joint = place(SPEC, members(8 * GB, 8 * GB), {"alpha+beta": "0:output"})
    fast, slow = Speed(1e9, 1e15), Speed(1e8, 1e15)
    one = predict(joint, {"alpha": fast, "beta": slow}, NEAR, Workload()).decode.step_s
    assert one == predict(joint, {"alpha": slow, "beta": slow}, NEAR, Workload()).decode.step_s


def test_a_ring_passes_small_tensors_whole_and_large_ones_in_pieces() -> None:
    four = ("alpha", "beta", "gamma", "delta")
    links = Links(2e-3, 1e6)
    assert all_reduce_s(four, links, 100) == pytest.approx(3 * (1e-3 + 1e-4))
    assert all_reduce_s(four, links, 10**6) == pytest.approx(6e-3 + 2)
    assert all_reduce_s(four[:2], links, 10**6) == pytest.approx(1e-3 + 1)


def test_the_crossover_is_where_both_take_as_long() -> None:
    modes = find_placements(SPEC, members(8 * GB, 8 * GB))
    speeds = dict.fromkeys(("alpha", "beta"), Speed(1e8, 1e15))
    found = compare(modes, speeds, Links(1e-4, 1e12), Workload(context=64)).tensor
    assert found is not None
    at = Links(2 * found.crossover_s, 1e12)
    again = compare(modes, speeds, at, Workload(context=64))
    # the pipeline has hops of its own, which grow with the round trip as well
    tensor, pipeline = again.rates["tensor"].decode.step_s, again.rates["pipeline"].decode.step_s
    assert tensor == pytest.approx(pipeline, rel=0.1)
