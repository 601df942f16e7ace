"""A cluster of ranks in one process, with members that come and go, or do not come together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import pytest

from convoy.cluster.options import HeadOptions, PeerOptions
from convoy.cluster.peer.ranks import RankPeers
from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.ranks.sums.sealed import SealedCollective
from convoy.engine.requests.request import GenerationRequest
from convoy.errors import StepError
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.testing.network import MemoryNetwork
from support.cluster import MEMBER, NAMES, PeerThread
from support.members import make_local_members, membership_of

SOURCE = ModelSource.resolve("demo-mini")
LONG = GenerationRequest(tuple(range(5, 35)), SamplingParams(temperature=0.0), 60, ignore_eos=True)


@dataclass
class Scene:
    members: dict[str, PeerThread]
    cluster: RunningCluster

    join: Callable[[str], None]

    @property
    def mode(self) -> str:
        return self.cluster.status().parallel.mode

    def start(self) -> Answer:
        answer = Answer()
        self.cluster.engine.submit(LONG, answer.take)
        return answer


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    some: threading.Event = field(default_factory=threading.Event)

    def take(self, output: Output) -> None:
        if isinstance(output, TokenOutput):
            self.tokens.append(output.token_id)
            if len(self.tokens) > 5:
                self.some.set()
        elif isinstance(output, FinishOutput | ErrorOutput):
            self.error = output.error if isinstance(output, ErrorOutput) else None
            self.ended.set()

    def result(self) -> list[int]:
        assert self.ended.wait(60)
        assert self.error is None, self.error
        return self.tokens


@contextmanager
def scene(num_members: int, **options: object) -> Iterator[Scene]:
    network, members = MemoryNetwork(), make_local_members(NAMES[:num_members])
    with ExitStack() as stack:
        peers: dict[str, PeerThread] = {}

        def join(name: str) -> None:
            me = next(one for one in members if one.name == name)
            peers[name] = peer = PeerThread(me, PeerOptions(MEMBER), network)
            stack.callback(peer.stop)

        for one in members[1:]:
            join(one.name)
        chosen = HeadOptions(**{"member": MEMBER, "wait_s": 5, "num_blocks": 64, **options})  # type: ignore[arg-type]
        cluster = RunningCluster.start(membership_of(members[0]), SOURCE, chosen, network=network)
        stack.callback(cluster.close)
        yield Scene(peers, cluster, join)


def break_joining(
    monkeypatch: pytest.MonkeyPatch, act: Callable[[RankPeers], object], *, only_rank: int = 1
) -> None:
    real = RankPeers.begin

    def begin(self: RankPeers) -> SealedCollective:
        if self.rank == only_rank:
            act(self)
        return real(self)

    monkeypatch.setattr(RankPeers, "begin", begin)


def refuse(_ranks: RankPeers) -> None:
    raise StepError("no sums today")
