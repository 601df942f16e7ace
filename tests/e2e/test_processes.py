"""Split equals whole once more, over real processes, real sockets and TLS; and the demo itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from convoy.cluster.head.head import Head
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import head_options, load_head
from e2e.served import convoy_json
from parity.test_cuts import LIMITS, NUM_TOKENS, alone, prompts_for
from support.driver import Driver, Run, assert_equal_to_the_bit

LAYOUTS = {
    "two members": ["0:4,output", "5:11"],
    "two members, reverse": ["7:output", "0:6"],
    "three members": ["0:2,output", "3:8", "9:11"],
}


@pytest.fixture(scope="module")
def demo() -> ModelSource:
    return ModelSource.resolve("demo")


@pytest.fixture(scope="module")
def whole(demo: ModelSource) -> tuple[Run, ...]:
    return alone(demo)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("two members", marks=pytest.mark.long),
        "two members, reverse",
        pytest.param("three members", marks=pytest.mark.long),
    ],
)
def test_logits_over_processes_and_tls_equal_the_whole_to_the_bit(
    demo: ModelSource, whole: tuple[Run, ...], layout: str
) -> None:
    layers = LAYOUTS[layout]
    options = LocalOptions(len(layers), layers, kernel="exact-f32", num_threads=1)
    with LocalCluster(options) as local:
        local.start_peers("demo")
        config = local.config(local.head)
        head = Head(load_head(config), demo, head_options(config), watch=local.check_alive)
        try:
            head.bring_up()
            assert head.executor is not None
            limits = replace(LIMITS, prefill_chunk=50, micro_batches=len(layers))
            runs = Driver(head.executor, limits).run(prompts_for(demo), NUM_TOKENS)
            assert head.sealed_bytes() > 100_000
        finally:
            head.close()
    assert_equal_to_the_bit(whole, runs)


@pytest.mark.slow
@pytest.mark.long
def test_the_demo_ends_by_itself_with_equal_tokens() -> None:
    shown = convoy_json("demo")
    assert shown["equal_to_one_process"] is True
    assert shown["sealed_bytes"] > 10_000
    assert next(answer["text"] for answer in shown["answers"]) == "117"
    assert [stage["member"] for stage in shown["stages"]] == ["alpha", "beta"]
