"""A last peer that owns the output and lies: the plan ends with the fault, and the next one answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.completion import generate
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from convoy.transport.link.link import Link
from convoy.wire.messages.control import SampleReplies, SampleReply, Step
from convoy.wire.tensor import WireTensor
from support.cases import cases
from support.cluster import MEMBER, PeerThread
from support.members import make_local_members, membership_of

FORWARD = {"alpha": "0:1", "beta": "2:output"}
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture
def parties() -> Iterator[tuple[RunningCluster, PeerThread]]:
    network, members = MemoryNetwork(), make_local_members(["alpha", "beta"])
    peer = PeerThread(members[1], PeerOptions(MEMBER), network)
    options = HeadOptions(MEMBER, spans=FORWARD, wait_s=60, num_blocks=32)
    source = ModelSource.resolve("demo-mini")
    cluster = RunningCluster.start(membership_of(members[0]), source, options, network=network)
    yield cluster, peer
    cluster.close()
    peer.stop()


def ask(cluster: RunningCluster, params: SamplingParams = GREEDY) -> str:
    prompt = [{"role": "user", "content": "What is 8+9? Answer with just the number."}]
    ids = tuple(cluster.tokenizer.encode_chat(prompt))
    return generate(cluster.engine, GenerationRequest(ids, params, 8)).text


class Liar:
    """Stand in for the last peer's link to the head, and say something else for each step."""

    def __init__(self, real: Link, lie: Callable[[SampleReplies], SampleReplies | WireTensor]) -> None:
        self._real = real
        self._lie = lie

    def send(self, sampled: SampleReplies, *, plan_id: int, step: int) -> None:
        said = self._lie(sampled)
        if isinstance(said, WireTensor):
            self._real.send_tensor(said, plan_id=plan_id, step=step, boundary=4)
        else:
            self._real.send(said, plan_id=plan_id, step=step)


def changed(**changes: object) -> Callable[[SampleReplies], SampleReplies]:
    def lie(sampled: SampleReplies) -> SampleReplies:
        return SampleReplies(
            sampled.number, [msgspec.structs.replace(one, **changes) for one in sampled.answers]
        )

    return lie


ONE = SampleReply(5, 0.0, [], b"", "", 0)


LIES: list[tuple[Callable[[SampleReplies], SampleReplies | WireTensor], str]] = [
    (lambda sampled: SampleReplies(sampled.number, [*sampled.answers, ONE]), "samples, expected"),
    (lambda sampled: SampleReplies(sampled.number, []), "came back with 0 samples, expected 1"),
    (changed(token_id=1 << 40), "came back malformed: an answer has a token outside the vocabulary"),
    (changed(token_id=-3), "came back malformed: an answer has a token outside the vocabulary"),
    (changed(logits=bytes(1 << 20)), "1048576 bytes of logits, and none were asked for"),
    (changed(top=[(1, 0.5)] * 20), "came back malformed: an answer has 20 alternatives, expected 0"),
    (lambda sampled: SampleReplies(sampled.number + 7, sampled.answers), "the end of step"),
    (lambda _: WireTensor("float32", (1, 192), bytes(192 * 4)), "the end of step"),
]
# A wrong number of answers, a wrong answer, and another message.
QUICK = (LIES[1], LIES[2], LIES[7])


@pytest.mark.parametrize(("lie", "told"), cases(LIES, QUICK.__contains__))
def test_a_lie_of_the_owner_of_the_output_ends_the_plan_and_is_named(
    parties: tuple[RunningCluster, PeerThread],
    lie: Callable[[SampleReplies], SampleReplies | WireTensor],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, peer = parties
    assert ask(cluster) == "17"
    loaded = peer.peer.loaded
    assert loaded is not None
    assert loaded.loop is not None
    loaded.loop.successor = Liar(loaded.loop.successor, lie)  # type: ignore[assignment]
    with caplog.at_level("WARNING"):
        assert ask(cluster) == "17", "the plan is over, and the next one answers"
    assert told in caplog.text
    assert cluster.engine.stats().recoveries == 1


def test_logits_that_the_owner_of_the_output_cannot_sample_from_end_one_request(
    parties: tuple[RunningCluster, PeerThread],
) -> None:
    cluster, peer = parties
    loaded = peer.peer.loaded
    assert loaded is not None
    assert loaded.loop is not None
    real = loaded.loop.successor
    loaded.loop.successor = Liar(real, changed(error="so it is"))  # type: ignore[assignment]
    with pytest.raises(Exception, match="the owner of the output could not sample from its logits"):
        ask(cluster)
    loaded.loop.successor = real
    assert ask(cluster) == "17"
    assert cluster.engine.stats().recoveries == 0


def test_the_owner_of_the_output_sees_prompts_only_as_far_as_a_penalty_looks_back(
    parties: tuple[RunningCluster, PeerThread],
) -> None:
    cluster, peer = parties
    loaded = peer.peer.loaded
    assert loaded is not None
    assert loaded.loop is not None
    seen: list[Step] = []
    real = loaded.loop.accept_step

    def accept(step: Step, plan_id: int) -> None:
        seen.append(step)
        real(step, plan_id)

    loaded.loop.accept_step = accept  # type: ignore[method-assign]
    ask(cluster)
    assert all(step.tokens == b"" for step in seen), "it does not own the embedding"
    assert not any(sample.prompt or sample.generated for step in seen for sample in step.samples)
    seen.clear()
    ask(cluster, SamplingParams(temperature=0.0, repetition_penalty=1.0001))
    first = next(sample for step in seen for sample in step.samples)
    ids = np.frombuffer(first.prompt, dtype="<u4").tolist()
    assert ids == sorted(set(ids)), "not even its order"
