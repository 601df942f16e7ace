"""Long prompts over several stages: the traffic on links, the steps in flight, and cancelled prompts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.outputs import FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.run.pipeline import PipelineExecutor
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kv.pools import BlockTables
from convoy.model.sampling.params import SamplingParams
from convoy.wire.messages.control import Step
from support.cases import cases
from support.cluster import running_cluster

GREEDY = SamplingParams(temperature=0.0)
LAYOUTS = {
    "default": {"alpha": "0:1,output", "beta": "2:3"},
    "reverse": {"alpha": "3:output", "beta": "0:2"},
    "forward": {"alpha": "0:1", "beta": "2:output"},
}
LONG = tuple(range(5, 260)) * 2


@pytest.fixture(scope="module")
def mini() -> ModelSource:
    return ModelSource.resolve("demo-mini")


def returned_bytes(cluster: RunningCluster) -> int:
    return sum(link.received_sealed_bytes for link in cluster.head.links.values())


@pytest.mark.parametrize("layout", cases(LAYOUTS, lambda one: one != "default"))
def test_chunks_that_need_no_output_come_back_as_acknowledgements(mini: ModelSource, layout: str) -> None:
    with running_cluster(mini, 2, spans=LAYOUTS[layout], prefill_chunk=64, level_chunks=False) as cluster:
        before = returned_bytes(cluster)
        generate(cluster.engine, GenerationRequest(LONG, GREEDY, 1, ignore_eos=True))
        found = returned_bytes(cluster) - before
    row = 4 * mini.spec.hidden_size
    if layout == "reverse":
        assert found > len(LONG) * row, "the head runs the last layers, so it needs every row"
    else:
        assert found < 2 * row + 8 * 300, "one row or one token, and seven empty frames"


@pytest.mark.parametrize("layout", cases(LAYOUTS, "forward".__eq__))
def test_chunks_of_one_prompt_are_on_several_stages_at_once(
    mini: ModelSource, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    real = PipelineExecutor.submit

    def submit(self: PipelineExecutor, step: Step, samples: object) -> None:
        nonlocal most
        real(self, step, samples)  # type: ignore[arg-type]
        chunks = [one.step for one in self._in_flight if one.step.rows]
        most = max(most, len(chunks))
        assert len(self._in_flight) <= self.depth

    monkeypatch.setattr(PipelineExecutor, "submit", submit)
    with running_cluster(mini, 2, spans=LAYOUTS[layout], prefill_chunk=32, prefill_window=3) as cluster:
        assert most == 1, "the first token alone"
        generate(cluster.engine, GenerationRequest(LONG, GREEDY, 4, ignore_eos=True))
    assert most == 3


class Tables:
    """Keep every stage's block tables as they are after each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: dict[str, BlockTables] = {}
        self.lengths: dict[str, list[int]] = {}
        self.changed = threading.Condition()
        real = HostStage.run

        def run(stage: HostStage, step: Step, hidden: object, tokens: object) -> object:
            out = real(stage, step, hidden, tokens)  # type: ignore[arg-type]
            with self.changed:
                self.of[stage.assignment.member] = stage.tables
                self.lengths.setdefault(stage.assignment.member, []).append(len(stage.tables))
                self.changed.notify_all()
            return out

        monkeypatch.setattr(HostStage, "run", run)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, 30)

    def all_empty(self) -> bool:
        return len(self.of) == 2 and not any(len(tables) or tables.num_held for tables in self.of.values())


@pytest.mark.parametrize("layout", cases(LAYOUTS, "reverse".__eq__))
def test_a_prompt_that_is_cancelled_while_it_is_read_leaves_no_block_on_any_stage(
    mini: ModelSource, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(monkeypatch)
    pace: dict[str, Any] = {"prefill_chunk": 4, "prefill_window": 3, "level_chunks": False}
    with running_cluster(mini, 2, spans=LAYOUTS[layout], **pace) as cluster:
        told: list[Output] = []
        began = {name: len(steps) for name, steps in tables.lengths.items()}
        handle = cluster.engine.submit(GenerationRequest(LONG, GREEDY, 4), told.append)
        tables.wait_until(lambda: all(len(s) > began[n] + 2 for n, s in tables.lengths.items()))
        handle.abort()
        at_abort = cluster.engine.scheduler.next_step
        assert [type(one) for one in told] == [FinishOutput]
        assert cluster.engine.stats().free_blocks == cluster.engine.stats().num_blocks
        tables.wait_until(tables.all_empty)
        # at most the step that was in the making, and the one that carries the release
        assert cluster.engine.scheduler.next_step <= at_abort + 2
        assert max(map(len, tables.lengths.values())) < len(LONG) // 4, "it was not read to its end"


def test_a_stream_that_is_cancelled_frees_its_blocks_while_others_go_on(
    mini: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = Tables(monkeypatch)
    with running_cluster(mini, 2, spans=LAYOUTS["forward"]) as cluster:
        whole = generate(cluster.engine, GenerationRequest(LONG[:9], GREEDY, 60, ignore_eos=True)).token_ids
        tables.wait_until(tables.all_empty)
        told: list[Output] = []
        enough, done = threading.Event(), threading.Event()

        def listen(output: Output) -> None:
            told.append(output)
            if len(told) == 5:
                enough.set()
            if isinstance(output, FinishOutput):
                done.set()

        cluster.engine.submit(GenerationRequest(LONG[:9], GREEDY, 60, ignore_eos=True), listen)
        handle = cluster.engine.submit(
            GenerationRequest(LONG[:30], GREEDY, 400, ignore_eos=True), lambda _: None
        )
        assert enough.wait(30)
        handle.abort()
        tables.wait_until(lambda: all(len(held) <= 1 for held in tables.of.values()))
        assert done.wait(30)
        assert [one.token_id for one in told if isinstance(one, TokenOutput)] == list(whole)
        tables.wait_until(tables.all_empty)
