"""Streams over real peers, one of which is about to be lost: what came before, during and after."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from convoy.cluster.options import RebalanceOptions
from convoy.cluster.running import RunningCluster
from convoy.engine.outputs import ErrorOutput, FinishOutput, Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.checkpoints.source import ModelSource
from convoy.model.sampling.params import SamplingParams
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.sdk.options import head_options, load_head
from convoy.transport.ports import free_port
from support.bad_wire import BadWire

# It only bounds a wait. The start of a member is the longest.
WAIT_S = 240.0
WAITS = {"wait_s": WAIT_S, "recover_wait_s": WAIT_S}
ENGINE = {"num_blocks": 256}
# Longer than the whole is no fault, so that streams are under way when something happens.
NUM_TOKENS = 60
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=0.9, top_p=0.95, seed=7),
}


@dataclass
class Stream:
    """Hold the tokens of one request and when each came."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)
    error: BaseException | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def take(self, output: Output) -> None:
        if isinstance(output, TokenOutput):
            self.tokens.append(output.token_id)
            self.times_s.append(time.monotonic())
        elif isinstance(output, FinishOutput | ErrorOutput):
            self.error = output.error if isinstance(output, ErrorOutput) else None
            self.ended.set()

    def pause_s(self, after_s: float) -> float:
        """Return the time from this moment to the next token."""
        return min(at_s for at_s in self.times_s if at_s > after_s) - after_s


@dataclass
class Survival:
    """Run a head in this process, peers in their own, and a relay in front of those that ``wires`` names."""

    local: LocalCluster
    cluster: RunningCluster
    wires: dict[str, BadWire]
    model: str
    # Those with layers at the start, and how they share them.
    planned: tuple[set[str], str]
    _expected: dict[str, Stream] = field(default_factory=dict)
    _recoveries: int = 0

    def make_whole(self) -> Survival:
        """Bring back what earlier tests lost. Return once the members of the start have layers again."""
        for wire in self.wires.values():
            wire.mend()
        for name, process in self.local.processes.items():
            if process.poll() is None:
                self.go_on(name)
            else:
                self.restart(name)
        wait_for(self._is_whole, self._state)
        self._recoveries = self.cluster.engine.stats().recoveries
        return self

    def _is_whole(self) -> bool:
        # A member may end at its start, for instance because its port was taken meanwhile.
        self.local.check_alive()
        return self.cluster.health()[0] and sharing_of(self.cluster) == self.planned

    def _state(self) -> str:
        return f"{self.cluster.health()}, {sharing_of(self.cluster)}, planned {self.planned}"

    def recoveries(self) -> int:
        """Return the number of recoveries since the cluster was whole."""
        return self.cluster.engine.stats().recoveries - self._recoveries

    def pid(self, name: str) -> int:
        return self.local.processes[name].pid

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def stop(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGSTOP)

    def go_on(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGCONT)

    def lose(self, name: str, way: str) -> None:
        """Kill or stop a member."""
        {"kill": self.kill, "stop": self.stop}[way](name)

    def restart(self, name: str, *flags: str) -> None:
        self.local.processes[name].wait()
        config = str(self.local.config_file(name))
        arguments = ("join", "--config", config, "--model", self.model, "--until-stdin-closes", *flags)
        self.local.start(name, *arguments)

    def log(self, name: str) -> str:
        return self.local.log_file(name).read_text()

    def members(self) -> list[str]:
        return [stage.member for stage in self.cluster.status().stages]

    def start(self, params: SamplingParams, prompt: str, salt: bytes = b"") -> Stream:
        ids = tuple(self.cluster.tokenizer.encode_chat([{"role": "user", "content": prompt}]))
        stream = Stream()
        request = GenerationRequest(ids, params, max_tokens=NUM_TOKENS, ignore_eos=True, cache_salt=salt)
        self.cluster.engine.submit(request, stream.take)
        return stream

    def run(
        self,
        act: Callable[[], None] | None = None,
        *,
        after: int = 10,
        prompt: str = "Tell me a story about a dog.",
        salt: bytes = b"",
    ) -> dict[str, Stream]:
        """Run a greedy and a seeded stream at once; call ``act`` once both have ``after`` tokens.

        No K/V of runs with another ``salt`` is used again.
        """
        streams = {name: self.start(params, prompt, salt) for name, params in PARAMS.items()}
        if act is not None:
            wait_for(lambda: all(len(stream.tokens) >= after for stream in streams.values()))
            act()
        for stream in streams.values():
            assert stream.ended.wait(WAIT_S), self.cluster.health()
            assert stream.error is None, stream.error
        return streams

    def check(self, act: Callable[[], None], *, after: int = 10) -> float:
        """Check for the same text with the loss as without. Return seconds to the next token of both."""
        self._expected = self._expected or self.run()
        at_s: list[float] = []

        def act_now() -> None:
            at_s.append(time.monotonic())
            act()

        found = self.run(act_now, after=after)
        for name in PARAMS:
            assert found[name].tokens == self._expected[name].tokens, f"the {name} text differs"
        return max(stream.pause_s(at_s[0]) for stream in found.values())


def told(what: str, pause_s: float) -> None:
    print(f"{what}: {pause_s:.2f} s to the next token")


def sharing_of(cluster: RunningCluster) -> tuple[set[str], str]:
    """Return the members with layers, ranks among them, and how they share the layers."""
    status = cluster.status()
    return {stage.member for stage in status.stages}, status.parallel.mode


def wait_for(condition: Callable[[], object], state: Callable[[], str] = lambda: "") -> None:
    """Poll until it holds: other processes and threads have no event for it. A failure tells ``state``."""
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"what was waited for never came: {state()}"
        time.sleep(0.01)


@contextmanager
def survival(
    num_members: int,
    *,
    model: str = "demo",
    spans: list[str] | None = None,
    head_bytes: int = 0,
    wires: tuple[str, ...] = (),
    standby: tuple[str, ...] = (),
    options: Mapping[str, float] | None = None,
    sharing: Mapping[str, object] | None = None,
    fed: bool = False,
) -> Iterator[Survival]:
    """Bring it up and take it down. ``head_bytes`` is what the head offers, 0 for enough.

    ``sharing``: keys of [plan], how the members share the model. With ``fed``, steps are fed, and nothing is
    guessed.
    """
    engine = {**ENGINE, "speculate": 0} if fed else ENGINE
    local_options = LocalOptions(
        num_members, spans, kernel="exact-f32", num_threads=1, engine=engine, sharing=dict(sharing or {})
    )
    with LocalCluster(local_options) as local:
        relays = {name: _wire(local, name) for name in wires}
        for name in local.names[1:]:
            flags = ["--standby"] if name in standby else []
            file = str(local.config_file(name))
            local.start(name, "join", "--config", file, "--model", model, "--until-stdin-closes", *flags)
        config = local.config(local.head)
        # A member that was lost in many tests is used again as soon as no request runs. On a busy machine its
        # plan may fail the first time, and the usual pause of 180 s before the next is most of WAIT_S.
        rebalance = RebalanceOptions(max_at_once=1000, again_s=2.0)
        # A plan without a member whose start took long would be another one.
        changed = {"rebalance": rebalance, **WAITS, **(options or {})}
        head = replace(head_options(config), **changed)  # type: ignore[arg-type]
        if head_bytes:
            head = replace(head, member=replace(head.member, memory_bytes=head_bytes))
        source = ModelSource.resolve(model)
        cluster = RunningCluster.start(load_head(config), source, head, watch=local.check_alive)
        try:
            yield Survival(local, cluster, relays, model, sharing_of(cluster))
        finally:
            cluster.close()
            for relay in relays.values():
                relay.close()
            for name, process in local.processes.items():
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGCONT)
                print(f"--- {name}\n{local.log_file(name).read_text()}")


def _wire(local: LocalCluster, name: str) -> BadWire:
    """Put a relay at the roster's address, and let the member listen elsewhere."""
    file = local.config_file(name)
    text = file.read_text()
    found = re.search(r"^port = (\d+)$", text[text.index("[listen]") :], re.MULTILINE)
    assert found is not None
    listed = int(found.group(1))
    real = free_port()
    file.write_text(text.replace(f"port = {listed}\n", f"port = {real}\n", 1))
    return BadWire(("127.0.0.1", listed), ("127.0.0.1", real))
