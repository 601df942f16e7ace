"""A model of layers that look back differently far: split and in rings, its logits are those of the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest

from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.local import LocalExecutor
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.model.stage import StageOptions
from convoy.wire.messages.control import StageAssignment
from parity.test_sessions import running
from support.driver import GREEDY, Driver, Run, assert_equal_to_the_bit, seeded
from support.odd_models import make_windowed_qwen3

WINDOW, CONTEXT = 24, 256
SPANS = {
    "two": {"alpha": "0:1,output", "beta": "2:4"},
    "three": {"alpha": "0:0,output", "beta": "1:2", "gamma": "3:4"},
    "reverse": {"alpha": "3:output", "beta": "0:2"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource.resolve(str(make_windowed_qwen3(tmp_path_factory.mktemp("windows"), WINDOW)))


def prompt(count: int, seed: int) -> tuple[int, ...]:
    random = Random(seed)
    return tuple(random.randrange(5, 105) for _ in range(count))


PROMPTS = [(prompt(n, n), seeded(n) if n % 2 else GREEDY) for n in (1, 16, 23, 24, 40, 65, 130, 201)]


def limits(*rings: int | None, **changes: int) -> SchedulerLimits:
    groups = tuple(GroupLimits(128 if ring is None else 8 * ring, ring) for ring in rings)
    return replace(SchedulerLimits(groups, block_size=16, max_batch=8), **changes)  # type: ignore[arg-type]


def driver(source: ModelSource, chosen: SchedulerLimits) -> Driver:
    stage = HostStage.load(source, StageAssignment("alone", 0, 5, True, True), StageOptions(num_threads=1))
    stage.make_pools([group.num_blocks for group in chosen.groups])
    return Driver(LocalExecutor(stage), chosen)


@pytest.fixture(scope="module")
def whole(source: ModelSource) -> list[Run]:
    """Run each prompt by itself and in one piece, over tables that keep everything."""
    driven = driver(source, limits(None, None, max_step_tokens=512, prefill_chunk=512))
    return [run for one in PROMPTS for run in driven.run([one], 20)]


def test_rings_beside_each_other_give_the_bits_of_tables_that_keep_everything(
    source: ModelSource, whole: list[Run]
) -> None:
    groups = source.spec.cache_groups
    assert [group.window for group in groups] == [None, WINDOW]
    for chunk in (5, 50):
        rings = [group.ring_blocks(16, chunk) for group in groups]
        runs = driver(source, limits(*rings, prefill_chunk=chunk, max_step_tokens=64)).run(PROMPTS, 20)
        assert_equal_to_the_bit(whole, runs)


def test_who_is_preempted_for_want_of_a_ring_says_the_same(source: ModelSource, whole: list[Run]) -> None:
    chosen = limits(None, 4, prefill_chunk=16)
    scarce = replace(chosen, groups=(GroupLimits(40), GroupLimits(13, 4)))
    driven = driver(source, scarce)
    assert_equal_to_the_bit(whole, driven.run(PROMPTS, 20))
    assert driven.num_preempted > 0


@pytest.mark.parametrize("layout", SPANS)
@pytest.mark.long
def test_requests_and_sessions_over_a_split_say_what_the_whole_says(
    source: ModelSource, whole: list[Run], layout: str, tmp_path: Path
) -> None:
    with running(source, SPANS[layout], prefill_chunk=16, speculate=4, max_batch=4, num_blocks=0) as cluster:
        engine = cluster.engine
        ring = 1 + -(-(WINDOW - 1 + 65) // 16)  # a token and 64 guesses are more than a chunk
        assert cluster.head.active_plan is not None
        assert cluster.head.active_plan.num_blocks == (4 * CONTEXT // 16, 4 * ring)
        for run in whole:
            asked = GenerationRequest(run.prompt, run.params, max_tokens=20, ignore_eos=True)
            assert list(generate(engine, asked).token_ids) == run.tokens
        longest = whole[-1]
        with cluster.session() as session:
            assert session.sync(longest.prompt) == len(longest.prompt)
            assert np.array_equal(session.logits(), longest.logits[0])
            session.eval(longest.tokens[0])
            assert np.array_equal(session.logits(), longest.logits[1])
            session.save(tmp_path / "chat", None)
            assert (tmp_path / "chat").stat().st_size < 10_000, "K/V of a ring is not carried"
            with session.fork() as fork:
                fork.eval(longest.tokens[1])
                assert np.array_equal(fork.logits(), longest.logits[2])
            session.rewind(2)
            assert session.sync(longest.prompt) == 9, "the ring has the end of the prompt"
            assert np.array_equal(session.logits(), longest.logits[0])
        with cluster.session() as session:
            assert session.load(tmp_path / "chat") == 0
            assert np.array_equal(session.logits(), longest.logits[1])
        stats = engine.stats()
        assert stats.cached_tokens > 0
        assert stats.drafted_tokens > 0


@pytest.mark.long
def test_a_guess_changes_no_text_where_windows_are_rings(source: ModelSource) -> None:
    asked = GenerationRequest(
        prompt(9, 3) * 12, SamplingParams(temperature=0.0), max_tokens=60, ignore_eos=True
    )
    told = []
    for guesses in (0, 8):
        with running(source, SPANS["two"], prefill_chunk=16, speculate=guesses, num_blocks=0) as cluster:
            told.append(list(generate(cluster.engine, asked).token_ids))
            assert bool(cluster.engine.stats().drafted_tokens) == bool(guesses)
    assert told[0] == told[1]
