"""Predicted rates, by numbers that a person can check."""

from __future__ import annotations

import pytest

from convoy.plan.placement import Placement, place
from convoy.plan.rates import Links, Speed, Workload, predict, read_bytes
from convoy.plan.spec import ModelSpec
from plan.test_placement import GB, members, spec_of
from plan.test_weights import moe

SPEC = spec_of()
FAST = Speed(1e12, 1e15)
NEAR = Links(1e-6, bytes_per_s=1e12)


def two(spec: ModelSpec = SPEC) -> Placement:
    return place(spec, members(8 * GB, 8 * GB))


def names(placement: Placement) -> list[str]:
    return [stage.member for stage in placement.stages]


def test_one_sequence_takes_every_stage_and_every_hop_in_turn() -> None:
    placement = two()
    speed = Speed(1e9, 1e15)
    found = predict(
        placement, dict.fromkeys(names(placement), speed), Links(2e-3, 1e12), Workload(context=64)
    )
    read = [read_bytes(SPEC, stage, "float32", 1, 64) for stage in placement.stages]
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
    slowest = max(read_bytes(SPEC, stage, "float32", 4, 64) for stage in placement.stages) / 1e9
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
    lone = sum(read_bytes(spec, stage, "float32", 1, 0) for stage in placement.stages)
    held = sum(
        spec.weight_bytes(s.start, s.end, embed=False, output=s.output, dtype="float32")
        for s in placement.stages
    )
    assert lone < 0.7 * held


def test_what_was_not_measured_is_said() -> None:
    placement = two()
    head, peer = names(placement)
    guessed = Speed(1e9, 1e12, measured=False)
    found = predict(placement, {head: FAST, peer: guessed}, Links(5e-4), Workload())
    assert found.assumed[0] == f"that {peer} is as fast as this machine"
    assert found.assumed[1] == f"a round trip of 0.5 ms: {head} to {peer}, {peer} to {head}"
    told = Links(5e-4, by_pair={frozenset((head, peer)): 1e-3})
    assert predict(placement, {head: FAST, peer: FAST}, told, Workload()).assumed == [
        "wires that carry 100 MB/s"
    ]
