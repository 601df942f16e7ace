"""K/V over real links: a peer that hangs is noticed soon, and one behind a slow link is waited for."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from convoy.engine.run.kv_client import KvClient
from convoy.engine.run.kv_server import KvServer
from convoy.engine.run.send_guard import SendGuard
from convoy.errors import ConvoyError, StageLost
from convoy.model.backends.host.stage import HostStage
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import StageOptions
from convoy.testing.links import memory_link_pair
from convoy.transport.link.incoming import Received, ReceivedTensor
from convoy.transport.link.link import Link
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.control import FrameType, ReadBlocks, StageAssignment, WriteBlocks
from support.links import tls_link_pair
from support.members import make_local_members
from support.synthetic import write_config

PLAN_ID = 5
LAYERS = 4
STAGES = (
    StageAssignment("alpha", 0, 1, embed=True, output=True),
    StageAssignment("beta", 1, LAYERS, embed=False, output=False),
)
NUM_BLOCKS = 256
TO_PEER = frozenset({FrameType.READ_BLOCKS, FrameType.WRITE_BLOCKS, FrameType.BLOCKS})
TO_HEAD = frozenset({FrameType.BLOCKS, FrameType.BLOCKS_DONE})
TAGS = [bytes([i]) * 16 for i in range(NUM_BLOCKS)]
SLOW_BYTES_PER_S = 400 * 1024


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource.resolve(f"synthetic:{write_config(tmp_path_factory.mktemp('model'))}@5")


def make_stage(source: ModelSource, assignment: StageAssignment) -> HostStage:
    stage = HostStage.load(source, assignment, StageOptions(kernel="plain-f32"))
    stage.make_pools(NUM_BLOCKS)
    return stage


class SlowStream:
    """Let so many bytes a second through; no call returns before its bytes did."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.recv_into = stream.recv_into
        self.set_deadline = stream.set_deadline
        self.close = stream.close

    def send_all(self, data: bytes | bytearray | memoryview) -> None:
        time.sleep(len(data) / SLOW_BYTES_PER_S)  # what a slow link does
        self._stream.send_all(data)


@contextmanager
def carrying(source: ModelSource, mine: Link, theirs: Link, *, answers: bool) -> Iterator[KvClient]:
    """Yield a head's carrier over real links. ``answers`` False: the peer is stopped, as by SIGSTOP."""
    # No send is too long by itself: the guard goes by the sign of life alone.
    guard = SendGuard(lambda: float("inf"))
    head = make_stage(source, STAGES[0])
    carrier = KvClient(head, STAGES, "alpha", {"beta": mine}, plan_id=PLAN_ID, timeout_s=3600.0, guard=guard)

    def ended(_link: Link, error: ConvoyError) -> None:
        carrier.end(error)

    def take(link: Link, received: Received) -> None:
        assert carrier.expects(link, received)
        carrier.handle_answer(link, received)

    mine.start(take, ended, TO_HEAD)
    if answers:
        keeper = KvServer(make_stage(source, STAGES[1]), theirs, PLAN_ID)
        theirs.start(answer_with(keeper), lambda _link, _error: None, TO_PEER)
    try:
        yield carrier
    finally:
        guard.close()
        for link in (mine, theirs):
            link.revoke("the test is over")


def answer_with(keeper: KvServer) -> Callable[[Link, Received], None]:
    """Work on another thread, as a peer does, so that the receiver can answer a ping."""
    arrived: queue.SimpleQueue[Received] = queue.SimpleQueue()

    def work() -> None:
        while True:
            received = arrived.get()
            if isinstance(received, ReceivedTensor):
                keeper.accept_tensor(received)
            elif isinstance(received.message, ReadBlocks | WriteBlocks):
                keeper.accept(received.message, received.plan_id)

    threading.Thread(target=work, daemon=True).start()
    return lambda _link, received: arrived.put(received)


def kv_of(num_blocks: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    numbers = np.random.default_rng(1).normal(size=(LAYERS, 2, 16 * num_blocks, 2, 8))
    return numbers.astype(np.float32)


def test_a_peer_that_hangs_while_it_is_asked_is_lost_by_its_silence(source: ModelSource) -> None:
    links = memory_link_pair(*make_local_members(("alpha", "beta")))
    hangs = pytest.raises(StageLost, match="beta hangs: nothing moves on its link")
    with carrying(source, *links, answers=False) as carrier, hangs:
        carrier.read(0, LAYERS, [0, 1])


def test_a_peer_that_hangs_while_it_is_sent_much_holds_nobody_up(source: ModelSource) -> None:
    """More than what lies between the two ends holds: the send itself hangs."""
    links = memory_link_pair(*make_local_members(("alpha", "beta")))
    hangs = pytest.raises(StageLost, match=r"could not be reached: this side closed .* takes nothing")
    with carrying(source, *links, answers=False) as carrier, hangs:
        carrier.write(0, range(NUM_BLOCKS), TAGS, kv_of(NUM_BLOCKS))


@pytest.mark.long
def test_a_peer_behind_a_slow_link_is_waited_for(source: ModelSource, tmp_path: Path) -> None:
    """Each way takes longer than a peer that hangs is waited for, and a ping stands behind the tensor."""
    links = tls_link_pair(*make_local_members(("alpha", "beta"), tmp_path), wrap=SlowStream)
    with carrying(source, *links, answers=True) as carrier:
        blocks, kv = range(160), kv_of(160)
        began_s = time.monotonic()
        carrier.write(0, blocks, TAGS[:160], kv)
        written_s = time.monotonic()
        assert np.array_equal(carrier.read(0, LAYERS, blocks), kv)
        assert min(written_s - began_s, time.monotonic() - written_s) > 2.0
