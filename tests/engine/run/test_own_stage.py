"""What the head's own stage cannot run ends the request that asks for it, and not the engine or a peer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import FrameTooLong, StageLost, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Step
from support.cluster import running_cluster
from support.waiting import wait_until

GREEDY = SamplingParams(temperature=0.0)
LONG = GenerationRequest(tuple(range(5, 35)), GREEDY, 4)
SHORT = GenerationRequest(tuple(range(5, 14)), GREEDY, 4, ignore_eos=True)
HEAD_LAST = {"beta": "0:1", "alpha": "2:output"}


def refuse_long_rows(cluster: RunningCluster, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Refuse rows of more than 20 tokens in the head's own stage from now on, whatever its layers."""
    run = HostStage.run

    def refuse(stage: HostStage, step: Step, hidden: Any, tokens: Any) -> Any:
        if stage is cluster.head.stage and any(row.num_tokens > 20 for row in step.rows):
            raise error
        return run(stage, step, hidden, tokens)

    monkeypatch.setattr(HostStage, "run", refuse)


def stages(cluster: RunningCluster) -> list[str]:
    assert cluster.head.active_plan is not None
    return [stage.member for stage in cluster.head.active_plan.plan.stages]


@pytest.mark.parametrize(
    ("num_members", "spans"),
    [
        pytest.param(1, None, id="alone"),
        pytest.param(2, None, id="first", marks=pytest.mark.long),
        pytest.param(2, HEAD_LAST, id="last", marks=pytest.mark.long),
    ],
)
def test_a_request_that_the_heads_own_stage_cannot_run_ends_alone(
    num_members: int, spans: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource.resolve("demo-mini")
    with running_cluster(source, num_members, spans=spans, prefill_chunk=64) as cluster:
        before = stages(cluster)
        refuse_long_rows(cluster, monkeypatch, StepError("there is no memory for a row of that size"))
        with pytest.raises(StageLost, match=r"failed at the request 8 times in a row: .* no memory"):
            generate(cluster.engine, LONG)
        assert len(generate(cluster.engine, SHORT).token_ids) == 4
        wait_until(lambda: cluster.health()[0])
        assert stages(cluster) == before, "no peer is given up for it"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("there is no memory for 3 rows of 8 bits"),
        pytest.param(torch.OutOfMemoryError("CUDA out of memory"), marks=pytest.mark.long),
        pytest.param(
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), marks=pytest.mark.long
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_request_for_which_the_head_has_no_memory_ends_alone(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_cluster(ModelSource.resolve("demo-mini"), 1, prefill_chunk=64) as cluster:
        refuse_long_rows(cluster, monkeypatch, error)
        with pytest.raises(StageLost, match=r"failed at the request 8 times in a row: .* no memory"):
            generate(cluster.engine, LONG)
        assert len(generate(cluster.engine, SHORT).token_ids) == 4


@pytest.mark.long
def test_a_frame_that_is_too_long_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with running_cluster(ModelSource.resolve("demo-mini"), 2, prefill_chunk=64) as cluster:
        send = Link.send

        def refuse(link: Link, message: Any, **where: Any) -> None:
            if isinstance(message, Step) and any(row.num_tokens > 20 for row in message.rows):
                raise FrameTooLong("a step of that size is over the limit")
            send(link, message, **where)

        monkeypatch.setattr(Link, "send", refuse)
        with pytest.raises(StageLost, match=r"failed at the request 8 times in a row: .* over the limit"):
            generate(cluster.engine, LONG)
        assert len(generate(cluster.engine, SHORT).token_ids) == 4
        assert stages(cluster) == ["alpha", "beta"]
