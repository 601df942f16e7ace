"""Split equals whole: for every cut, tokens and logits are those of one stage, difference exactly 0."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from convoy.cluster.head.head import Head
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.engine.run.executor import Executor
from convoy.engine.run.local import LocalExecutor
from convoy.engine.scheduler import GroupLimits, SchedulerLimits
from convoy.evaluate.questions import BUNDLED_QUESTIONS, load_questions, take
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.model.stage import StageOptions
from convoy.model.text.tokens import Tokenizer
from convoy.testing.network import MemoryNetwork
from convoy.wire.messages.control import StageAssignment
from support.cases import cases
from support.cluster import NAMES, PeerThread
from support.driver import GREEDY, Driver, Run, assert_equal_to_the_bit, seeded
from support.members import make_local_members, membership_of
from support.odd_models import make_odd_llama
from support.synthetic import write_config

NUM_BLOCKS = 256
NUM_TOKENS = 12
LIMITS = SchedulerLimits(groups=(GroupLimits(NUM_BLOCKS),), block_size=16, max_batch=16)
MEMBER = MemberOptions(num_threads=1, kernel="exact-f32", memory_bytes=1 << 32)


Prompts = list[tuple[tuple[int, ...], SamplingParams]]
# around tile, block and chunk boundaries
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 130)
FEW_LENGTHS, FEW_TOKENS = (1, 16, 17, 65), 4


def prompts_for(source: ModelSource, lengths: Sequence[int] = LENGTHS) -> Prompts:
    """Make prompts, greedy and seeded in turn."""
    random = np.random.default_rng(5)
    return [
        (tuple(random.integers(0, source.spec.vocab_size, length).tolist()), seeded(i) if i % 2 else GREEDY)
        for i, length in enumerate(lengths)
    ]


def whole(source: ModelSource, kv_dtype: str = "auto") -> Executor:
    assignment = StageAssignment("alone", 0, source.spec.num_layers, embed=True, output=True)
    stage = HostStage.load(source, assignment, StageOptions(num_threads=1, kv_dtype=kv_dtype))
    stage.make_pools(NUM_BLOCKS)
    return LocalExecutor(stage)


def alone(
    source: ModelSource, lengths: Sequence[int] = LENGTHS, num_tokens: int = NUM_TOKENS
) -> tuple[Run, ...]:
    """Run the reference: one stage, each prompt by itself, in one piece."""
    driver = Driver(whole(source), replace(LIMITS, max_step_tokens=1024, prefill_chunk=1024))
    prompts = prompts_for(source, lengths)
    return tuple(run for prompt in prompts for run in driver.run([prompt], num_tokens))


@pytest.fixture(scope="module")
def expected(demo: ModelSource) -> tuple[Run, ...]:
    """Return the runs of `alone` for the demo model."""
    return alone(demo)


@pytest.fixture(scope="module")
def turns(expected: tuple[Run, ...]) -> Prompts:
    """Return prompts that go on from an earlier prompt, from its answer, and from a cut within a block."""
    asked = [(*run.prompt, *run.tokens, 5, 6, 7) for run in expected] + [expected[-1].prompt[:100]]
    return [(turn, seeded(3)) for turn in asked]


@pytest.fixture(scope="module")
def cold(demo: ModelSource, turns: Prompts) -> list[Run]:
    """Return the answers to them where no prefix is shared."""
    return Driver(whole(demo), replace(LIMITS, prefix_cache=False)).run(turns, NUM_TOKENS)


@contextmanager
def split(source: ModelSource, spans: Mapping[str, str], kv_dtype: str = "auto") -> Iterator[Executor]:
    """Run a head and its peers over in-memory streams, sealed as ever."""
    network = MemoryNetwork()
    members = make_local_members(NAMES[: len(spans)])
    peers = [PeerThread(me, PeerOptions(MEMBER, model_path=source.path), network) for me in members[1:]]
    head = Head(
        membership_of(members[0]),
        source,
        HeadOptions(MEMBER, spans=spans, wait_s=20, num_blocks=NUM_BLOCKS, kv_dtype=kv_dtype),
        network,
    )
    try:
        head.bring_up()
        assert head.executor is not None
        yield head.executor
    finally:
        head.close()
        for peer in peers:
            peer.stop()


def two_way(num_layers: int) -> list[dict[str, str]]:
    last = num_layers - 1
    default = [{"alpha": f"0:{k},output", "beta": f"{k + 1}:{last}"} for k in range(last)]
    reverse = [{"alpha": f"{k}:output", "beta": f"0:{k - 1}"} for k in (1, num_layers // 2, last)]
    forward = [{"alpha": f"0:{k - 1}", "beta": f"{k}:output"} for k in (1, num_layers // 2, last)]
    return default + reverse + forward


def three_way(num_layers: int) -> list[dict[str, str]]:
    last = num_layers - 1
    cuts = list(itertools.combinations(range(1, num_layers), 2))
    spread = [cuts[0], cuts[len(cuts) // 3], cuts[2 * len(cuts) // 3], cuts[-1]]
    default = [
        {"alpha": f"0:{a - 1},output", "beta": f"{a}:{b - 1}", "gamma": f"{b}:{last}"} for a, b in spread
    ]
    a, b = spread[1]
    reverse = {"alpha": f"{b}:output", "beta": f"{a}:{b - 1}", "gamma": f"0:{a - 1}"}
    forward = {"alpha": f"0:{a - 1}", "beta": f"{a}:{b - 1}", "gamma": f"{b}:output"}
    return [*default, reverse, forward]


CHUNKS = (256, 1, 7, 64)


@pytest.mark.slow
@pytest.mark.long
def test_every_cut_of_the_demo_model_into_two_or_three_equals_the_whole(demo: ModelSource) -> None:
    prompts = prompts_for(demo, FEW_LENGTHS)
    expected = alone(demo, FEW_LENGTHS, FEW_TOKENS)
    layouts = two_way(demo.spec.num_layers) + three_way(demo.spec.num_layers)
    for index, spans in enumerate(layouts):
        limits = replace(LIMITS, prefill_chunk=CHUNKS[index % len(CHUNKS)], micro_batches=len(spans))
        with split(demo, spans) as executor:
            assert_equal_to_the_bit(expected, Driver(executor, limits).run(prompts, FEW_TOKENS))


@pytest.mark.parametrize("chunk", cases([1, 3, 16, 50, 256], (50).__eq__))
def test_batch_and_chunks_around_a_row_change_no_bit(
    demo: ModelSource, expected: tuple[Run, ...], chunk: int
) -> None:
    driver = Driver(whole(demo), replace(LIMITS, prefill_chunk=chunk, max_step_tokens=97))
    assert_equal_to_the_bit(expected, driver.run(prompts_for(demo), NUM_TOKENS))


@pytest.mark.parametrize("kv_dtype", [pytest.param("f16", marks=pytest.mark.long), "q8"])
def test_rounded_kv_are_the_same_on_every_member(demo: ModelSource, kv_dtype: str) -> None:
    prompts = prompts_for(demo, FEW_LENGTHS)
    limits = replace(LIMITS, max_step_tokens=1024, prefill_chunk=1024, prefix_cache=False)
    alone = Driver(whole(demo, kv_dtype), limits)
    expected = [run for prompt in prompts for run in alone.run([prompt], FEW_TOKENS)]
    with split(demo, two_way(demo.spec.num_layers)[4], kv_dtype) as executor:
        runs = Driver(executor, replace(LIMITS, prefill_chunk=7)).run(prompts, FEW_TOKENS)
    assert_equal_to_the_bit(expected, runs)


def test_preemption_and_replay_change_no_bit(demo: ModelSource, expected: tuple[Run, ...]) -> None:
    driver = Driver(whole(demo), replace(LIMITS, groups=(GroupLimits(24),), max_batch=10))
    runs = driver.run(prompts_for(demo), NUM_TOKENS)
    assert driver.num_preempted > 0
    assert_equal_to_the_bit(expected, runs)


@pytest.mark.parametrize(
    ("layout", "chunk"),
    cases(
        itertools.product(("whole", "default", "reverse", "forward"), (7, 256)),
        ("reverse", 7).__eq__,
    ),
)
def test_a_shared_prefix_changes_no_bit(
    demo: ModelSource,
    expected: tuple[Run, ...],
    turns: Prompts,
    cold: list[Run],
    layout: str,
    chunk: int,
) -> None:
    last = demo.spec.num_layers - 1
    spans = {
        "default": {"alpha": "0:1,output", "beta": f"2:{last}"},
        "reverse": {"alpha": "2:output", "beta": "0:1"},
        "forward": {"alpha": "0:1", "beta": "2:output"},
    }
    limits = replace(LIMITS, prefill_chunk=chunk, micro_batches=1 if layout == "whole" else 2)
    with nullcontext(whole(demo)) if layout == "whole" else split(demo, spans[layout]) as executor:
        driver = Driver(executor, limits)
        for _ in range(2):
            assert_equal_to_the_bit(expected, driver.run(prompts_for(demo), NUM_TOKENS))
        assert driver.num_cached_tokens == sum((len(run.prompt) - 1) // 16 * 16 for run in expected)
        assert_equal_to_the_bit(cold, driver.run(turns, NUM_TOKENS))
    before = sum((len(run.prompt) - 1) // 16 * 16 for run in expected)
    # the last token of an answer is told, but its K/V is never needed
    found = [(len(run.prompt) + NUM_TOKENS - 1) // 16 * 16 for run in expected]
    assert driver.num_cached_tokens == before + sum(found) + 96


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSource, tuple[Run, ...]]:
    """Make a model of odd dimensions, and return it with the runs of `alone`."""
    source = ModelSource.resolve(str(make_odd_llama(tmp_path_factory.mktemp("odd"))))
    return source, alone(source)


@pytest.mark.parametrize("members", cases([2, 3], (3).__eq__))
def test_a_model_of_odd_dimensions_equals_the_whole(
    odd: tuple[ModelSource, tuple[Run, ...]], members: int
) -> None:
    source, expected = odd
    layouts = two_way(source.spec.num_layers) if members == 2 else three_way(source.spec.num_layers)
    # the default, and the reverse of three or the forward of two
    for spans in [layouts[0], layouts[1 - members]]:
        with split(source, spans) as executor:
            limits = replace(LIMITS, prefill_chunk=7)
            assert_equal_to_the_bit(expected, Driver(executor, limits).run(prompts_for(source), NUM_TOKENS))


def test_a_model_drawn_by_every_member_for_itself_equals_the_whole(tmp_path: Path) -> None:
    source = ModelSource.resolve(f"synthetic:{write_config(tmp_path)}@5")
    expected = alone(source)
    assert all(np.isfinite(logits).all() and logits.std() > 0.1 for run in expected for logits in run.logits)
    assert len({token for run in expected for token in run.tokens}) > 20
    for spans in [two_way(source.spec.num_layers)[1], three_way(source.spec.num_layers)[-1]]:
        with split(source, spans) as executor:
            limits = replace(LIMITS, prefill_chunk=7)
            assert_equal_to_the_bit(expected, Driver(executor, limits).run(prompts_for(source), NUM_TOKENS))


def test_the_whole_stage_is_as_near_to_transformers_as_float32_allows(demo: ModelSource) -> None:
    # Logits reach 30 here, and the library's own float32 is itself up to 2.8e-5 from float64.
    reference = AutoModelForCausalLM.from_pretrained(demo.path, dtype=torch.float32, local_files_only=True)
    tokenizer = Tokenizer(demo)
    asked = take(load_questions(BUNDLED_QUESTIONS), 16)
    chats = [tokenizer.encode_chat([{"role": "user", "content": question.text}]) for question in asked]
    runs = Driver(whole(demo), LIMITS).run([(tuple(ids), GREEDY) for ids in chats], NUM_TOKENS)
    distances = []
    for run in runs:
        ids = torch.tensor([[*run.prompt, *run.tokens[:-1]]])
        with torch.inference_mode():
            expected = reference(ids).logits[0, len(run.prompt) - 1 :].numpy()
        distances.append(np.abs(expected - np.stack(run.logits)).max())
        assert distances[-1] <= 2e-5 * max(1.0, np.abs(expected).max() / 10)
    assert np.median(distances) <= 2e-5
