"""K/V on its way between a head and its stages: what a stage refuses, and what a head believes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from convoy.engine.run.kv_client import KvClient
from convoy.engine.run.kv_server import KvServer
from convoy.engine.run.send_guard import SendGuard
from convoy.errors import LinkBroken, StageLost, StepError
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.model.tensors import to_wire, tokens_from_bytes
from convoy.transport.link.link import Link, Received, ReceivedMessage, ReceivedTensor
from convoy.wire.messages.control import (
    BlockGrant,
    BlocksDone,
    FrameType,
    Message,
    ReadBlocks,
    Row,
    StageAssignment,
    Step,
    StepFailed,
    WriteBlocks,
)
from convoy.wire.tensor import WireTensor
from support.synthetic import write_config

PLAN_ID = 5
LAYERS = 4
STAGES = (
    StageAssignment("alpha", 0, 2, embed=True, output=True),
    StageAssignment("beta", 2, LAYERS, embed=False, output=False),
)
TAGS = (b"a" * 16, b"b" * 16)


class Wire:
    """Carry one direction of a link: frames arrive at ``to``, in the sender's thread."""

    def __init__(self, peer: str, to: Callable[[Received], None]) -> None:
        self.peer = peer
        self.to = to

    sent_sealed_bytes = received_sealed_bytes = 0

    def ping(self, timeout_s: float) -> float:
        return 0.0

    def send(self, message: Message, *, plan_id: int, step: int) -> None:
        self.to(ReceivedMessage(plan_id, step, message))

    def send_tensor(
        self, tensor: WireTensor, *, plan_id: int, step: int, boundary: int, kind: FrameType
    ) -> None:
        self.to(ReceivedTensor(plan_id, step, boundary, tensor, kind))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource.resolve(f"synthetic:{write_config(tmp_path_factory.mktemp('model'))}@5")


def make_stage(source: ModelSource, assignment: StageAssignment) -> HostStage:
    stage = HostStage.load(source, assignment, StageOptions(kernel="plain-f32"))
    stage.make_pools(8)
    return stage


@pytest.fixture
def stage(source: ModelSource) -> HostStage:
    return make_stage(source, STAGES[1])


@pytest.fixture
def said() -> queue.SimpleQueue[Received]:
    return queue.SimpleQueue()


@pytest.fixture
def keeper(stage: HostStage, said: queue.SimpleQueue[Received]) -> KvServer:
    return KvServer(stage, cast(Link, Wire("alpha", said.put)), PLAN_ID)


def kv_of(num_blocks: int, num_layers: int = 2, seed: int = 1) -> torch.Tensor:
    numbers = np.random.default_rng(seed).normal(size=(num_layers, 2, 16 * num_blocks, 2, 8))
    return torch.from_numpy(numbers.astype(np.float32))


def tensor_of(kv: torch.Tensor, *, number: int = 1, boundary: int = 2) -> ReceivedTensor:
    return ReceivedTensor(PLAN_ID, number, boundary, to_wire(kv), FrameType.BLOCKS)


def answer(said: queue.SimpleQueue[Received]) -> Any:
    received = said.get_nowait()
    return received.message if isinstance(received, ReceivedMessage) else received


def write_blocks(digest: str, blocks: Sequence[int] = (3, 1), tags: bytes = b"".join(TAGS)) -> WriteBlocks:
    return WriteBlocks(1, digest, list(blocks), tags)


def test_what_is_written_is_read_and_may_be_shared_under_its_tags(
    stage: HostStage, keeper: KvServer, said: queue.SimpleQueue[Received]
) -> None:
    kv = kv_of(2)
    keeper.accept(write_blocks(stage.model_digest), PLAN_ID)
    keeper.accept_tensor(tensor_of(kv))
    assert answer(said) == BlocksDone(1, "")
    keeper.accept(ReadBlocks(2, stage.model_digest, 3, 4, [1]), PLAN_ID)
    read = answer(said)
    assert (read.step, read.boundary, read.kind) == (2, 3, FrameType.BLOCKS)
    assert np.array_equal(np.frombuffer(read.tensor.data, "<f4").reshape(1, 2, 16, 2, 8), kv[1:, :, 16:])
    stage.apply(Step(0, [], [BlockGrant.append(0, 0, [3, 1], b"".join(TAGS))], [], b""))
    with pytest.raises(StepError, match="another prefix"):
        stage.apply(Step(1, [], [BlockGrant.append(1, 0, [1], TAGS[0])], [], b""))


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("another model", {"digest": "0" * 64}, {}, "is no use to"),
    ("a block there is not", {"blocks": (8, 1)}, {}, "block 8 is named, but the pool has 8"),
    ("a block twice", {"blocks": (1, 1)}, {}, "named twice"),
    ("too few tags", {"tags": b"a" * 16}, {}, "2 blocks come with 1 tags"),
    ("half a tag", {"tags": b"a" * 31}, {}, "2 blocks come with 2 tags"),
    ("another number", {}, {"number": 2}, "came as exchange 2, expected 1"),
    ("a layer too many", {}, {"boundary": 3}, r"layers [3, 5) came, and this stage has [2, 4)"),
    ("another's layer", {}, {"boundary": 1}, r"layers [1, 3) came, and this stage has [2, 4)"),
    ("no layer", {}, {"kv": kv_of(2, 0)}, r"layers [2, 2) came"),
    ("too few blocks", {}, {"kv": kv_of(1)}, "expected float32 of"),
    ("half the precision", {}, {"kv": kv_of(2).to(torch.float16)}, "came as float16"),
    ("no dimensions", {}, {"kv": torch.zeros(2)}, "expected float32 of"),
]


@pytest.mark.parametrize(
    ("asked", "sent", "error"), [row[1:] for row in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_a_stage_refuses_and_changes_nothing(
    stage: HostStage,
    keeper: KvServer,
    said: queue.SimpleQueue[Received],
    asked: dict[str, Any],
    sent: dict[str, Any],
    error: str,
) -> None:
    before = stage.read_blocks(2, 4, [3, 1]).clone()
    keeper.accept(write_blocks(**{"digest": stage.model_digest, **asked}), PLAN_ID)
    keeper.accept_tensor(tensor_of(**{"kv": kv_of(2), **sent}))
    done = answer(said)
    assert done.number == 1
    assert error in done.error
    assert said.empty(), "one answer to one question"
    assert torch.equal(stage.read_blocks(2, 4, [3, 1]), before)
    with pytest.raises(StepError, match="another prefix"):
        stage.apply(Step(0, [], [BlockGrant.append(0, 0, [3], TAGS[0])], [], b""))


def test_blocks_whose_layers_come_in_parts_are_shared_only_once_all_have_come(
    stage: HostStage, keeper: KvServer, said: queue.SimpleQueue[Received]
) -> None:
    kv = kv_of(2)
    grant = BlockGrant.append(0, 0, [3, 1], b"".join(TAGS))
    for layer, shared in ((2, False), (3, True), (2, False), (3, True)):
        keeper.accept(write_blocks(stage.model_digest), PLAN_ID)
        keeper.accept_tensor(tensor_of(kv[layer - 2 : layer - 1], boundary=layer))
        assert answer(said) == BlocksDone(1, "")
        if not shared:
            with pytest.raises(StepError, match="another prefix"):
                stage.apply(Step(0, [], [grant], [], b""))
    assert torch.equal(stage.read_blocks(2, 4, [3, 1]), kv)
    stage.apply(Step(0, [], [grant], [], b""))


def test_a_block_that_a_sequence_holds_is_not_written(
    stage: HostStage, keeper: KvServer, said: queue.SimpleQueue[Received]
) -> None:
    stage.apply(Step(0, [], [BlockGrant.append(0, 0, [1])], [], b""))
    keeper.accept(write_blocks(stage.model_digest), PLAN_ID)
    keeper.accept_tensor(tensor_of(kv_of(2)))
    assert "block 1 cannot be filled: a sequence holds it" in answer(said).error


@pytest.mark.parametrize(("start", "end"), [(0, 2), (1, 3), (3, 5), (3, 3), (4, 3), (-1, 3)])
def test_layers_that_are_not_its_own_are_not_read(
    stage: HostStage, keeper: KvServer, said: queue.SimpleQueue[Received], start: int, end: int
) -> None:
    keeper.accept(ReadBlocks(1, stage.model_digest, start, end, [0]), PLAN_ID)
    assert "are asked for, and this stage has [2, 4)" in answer(said).error


def test_too_much_at_once_is_refused_before_it_is_allocated(source: ModelSource) -> None:
    stage = HostStage.load(source, STAGES[1], StageOptions(kernel="plain-f32"))
    stage.make_pools(30_000)
    with pytest.raises(StepError, match="are over 67108864 bytes"):
        stage.read_blocks(2, 4, range(20_000))


def test_a_tensor_that_was_not_announced_or_is_of_another_plan_does_nothing(
    stage: HostStage, keeper: KvServer, said: queue.SimpleQueue[Received]
) -> None:
    keeper.accept_tensor(tensor_of(kv_of(2)))
    keeper.accept(write_blocks(stage.model_digest), PLAN_ID - 1)
    keeper.accept_tensor(tensor_of(kv_of(2)))
    assert said.empty()
    assert not stage.read_blocks(2, 4, [3, 1]).any()


class Pair:
    """Hold a head's carrier and a peer that answers as ``reply`` says."""

    def __init__(self, source: ModelSource) -> None:
        self.head = make_stage(source, STAGES[0])
        self.peer = make_stage(source, STAGES[1])
        to_head = Wire("beta", self.deliver)
        keeper = KvServer(self.peer, cast(Link, to_head), PLAN_ID)

        def hear(received: Received) -> None:
            if isinstance(received, ReceivedTensor):
                keeper.accept_tensor(received)
            elif isinstance(received.message, ReadBlocks | WriteBlocks):
                keeper.accept(received.message, received.plan_id)

        self.to_peer = Wire("beta", hear)
        links = {"beta": cast(Link, self.to_peer)}
        guard = SendGuard(lambda: 60.0)
        guard.close()  # nothing is sent but within this thread
        self.carrier = KvClient(
            self.head, STAGES, "alpha", links, plan_id=PLAN_ID, timeout_s=0.2, guard=guard
        )
        self.taken: list[bool] = []

    def deliver(self, received: Received) -> None:
        link = cast(Link, Wire("beta", print))
        self.taken.append(self.carrier.expects(link, received))
        self.carrier.handle_answer(link, received)


@pytest.fixture
def pair(source: ModelSource) -> Pair:
    return Pair(source)


def test_a_head_writes_and_reads_over_all_stages(pair: Pair) -> None:
    kv = kv_of(2, LAYERS).numpy()
    pair.carrier.write(0, [5, 0], TAGS, kv)
    assert np.array_equal(pair.carrier.read(0, LAYERS, [5, 0]), kv)
    assert np.array_equal(pair.carrier.read(1, 3, [0]), kv[1:3, :, 16:])
    pair.carrier.write(0, [2, 4], TAGS, kv[:1])
    pair.carrier.write(1, [2, 4], TAGS, kv[1:])
    assert np.array_equal(pair.carrier.read(0, LAYERS, [2, 4]), kv)
    assert all(pair.taken)


def test_what_a_peer_refuses_is_an_error_of_that_exchange_alone(pair: Pair) -> None:
    pair.peer.apply(Step(0, [], [BlockGrant.append(0, 0, [5])], [], b""))
    with pytest.raises(StepError, match="beta refused K/V of a session: block 5 cannot be filled"):
        pair.carrier.write(0, [5, 0], TAGS, kv_of(2, LAYERS).numpy())
    assert pair.carrier.read(0, LAYERS, [5]).shape == (LAYERS, 2, 16, 2, 8)


def test_an_answer_of_somebody_else_or_to_nothing_is_not_taken(pair: Pair) -> None:
    stray = tensor_of(kv_of(1))
    assert not pair.carrier.expects(cast(Link, Wire("beta", print)), stray)
    pair.to_peer.to = lambda _received: None
    with pytest.raises(StageLost, match="did not answer for its K/V"):
        pair.carrier.read(2, 4, [0])
    other = cast(Link, Wire("gamma", print))
    assert not pair.carrier.expects(other, tensor_of(kv_of(1), number=1))


def test_a_late_answer_is_dropped_and_not_taken_for_the_next(pair: Pair) -> None:
    hear, pair.to_peer.to = pair.to_peer.to, lambda _received: None
    with pytest.raises(StageLost):
        pair.carrier.read(2, 4, [0])
    pair.to_peer.to = hear
    pair.carrier.read(2, 4, [0])
    assert pair.carrier.expects(cast(Link, Wire("beta", print)), tensor_of(kv_of(1), number=1))


@pytest.mark.parametrize("wrong", [kv_of(1), kv_of(2, 1), torch.zeros(3)])
def test_kv_of_another_shape_than_was_asked_for_ends_the_plan(pair: Pair, wrong: torch.Tensor) -> None:
    pair.to_peer.to = lambda received: pair.deliver(tensor_of(wrong, number=received.step))
    with pytest.raises(StageLost, match="expected"):
        pair.carrier.read(2, 4, [0, 1])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_kv_that_no_session_could_be_loaded_with_ends_the_plan(pair: Pair, number: float) -> None:
    wrong = kv_of(1)
    wrong[1, 0, 3] = number
    pair.to_peer.to = lambda received: pair.deliver(tensor_of(wrong, number=received.step))
    with pytest.raises(StageLost, match="beta sent K/V that is not finite"):
        pair.carrier.read(2, 4, [0])


def test_an_answer_of_the_wrong_kind_ends_the_plan(pair: Pair) -> None:
    def done(received: Received) -> None:
        if isinstance(received, ReceivedMessage):
            pair.deliver(ReceivedMessage(PLAN_ID, received.step, BlocksDone(received.step, "")))

    pair.to_peer.to = done
    with pytest.raises(StageLost, match="by saying that it is done"):
        pair.carrier.read(2, 4, [0])


@pytest.mark.parametrize("fails", [True, False], ids=["a stage fails", "a link ends"])
def test_whoever_waits_is_told_and_so_is_whoever_asks_later(pair: Pair, fails: bool) -> None:
    def tell(_received: Received) -> None:
        if fails:
            pair.carrier.note(ReceivedMessage(PLAN_ID, 0, StepFailed(0, "the stage is over")))
        else:
            pair.carrier.end(LinkBroken("the link to beta is over"))

    pair.to_peer.to = tell
    for _ in range(2):
        with pytest.raises(StageLost, match="is over"):
            pair.carrier.read(2, 4, [0])
        pair.carrier.end(LinkBroken("told once more"))


def test_filled_blocks_give_the_logits_that_the_tokens_give(source: ModelSource, tmp_path: Path) -> None:
    """The K/V of one process, put into other blocks of another, stands for the tokens."""
    whole = StageAssignment("alone", 0, LAYERS, embed=True, output=True)
    one, other = make_stage(source, whole), make_stage(source, whole)
    tokens = np.arange(33, dtype="<u4").tobytes()
    row = Row(0, 0, 33, 1, b"r" * 16, b"".join(TAGS) + b"z" * 16)
    step = Step(0, [], [BlockGrant.append(0, 0, [0, 1, 2])], [row], tokens)
    expected = one.run(step, None, tokens_from_bytes(tokens))[-1]
    other.write_blocks(0, [7, 4], TAGS, one.read_blocks(0, LAYERS, [0, 1]))
    last = Row(0, 32, 1, 1, TAGS[1], b"z" * 16)
    grant = BlockGrant.append(0, 0, [7, 4, 3], b"".join(TAGS))
    found = other.run(Step(0, [], [grant], [last], tokens[-4:]), None, tokens_from_bytes(tokens[-4:]))
    assert torch.allclose(found[0], expected, atol=1e-5)


def test_the_carrier_answers_one_thread_while_another_delivers(pair: Pair) -> None:
    def later(received: Received) -> None:
        kv = tensor_of(kv_of(1), number=received.step)
        threading.Thread(target=pair.deliver, args=(kv,)).start()

    pair.to_peer.to = later
    assert np.array_equal(pair.carrier.read(2, 4, [0]), kv_of(1).numpy())
