"""A served cluster of real processes, for benches and tests that kill, stop, cut off and slow its members.

The head is ``convoy serve`` and each peer is ``convoy join``, as a person starts them. A relay that can cut
links stands before every peer.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

from convoy.cluster.children import Started, end
from convoy.config.kernels import EXACT
from convoy.errors import ConvoyError, PeerUnreachable
from convoy.sdk.endpoint import Endpoint
from convoy.sdk.local_cluster import Address, LocalCluster, LocalOptions
from convoy.transport.ports import free_port

if TYPE_CHECKING:
    from convoy.bench.hop.delay import DelayRelay

_START_S = 120.0
_END_S = 20.0
_POLL_S = 0.1
# How long a slow member is stopped, and how long it runs, in turn.
_STOPPED_S, _RUNNING_S = 1.9, 0.1


@dataclass(frozen=True, slots=True)
class ServedOptions:
    """Hold the options. `ServedCluster` chooses ``serve_port`` itself."""

    model: str
    local: LocalOptions
    start_wait_s: float = _START_S


@dataclass(slots=True)
class _Slowness:
    ended: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class ServedCluster(Started):
    """Own the processes; an `Arena` of `bench.recover`. Leaving the `with` ends them, also stopped ones."""

    def __init__(self, options: ServedOptions) -> None:
        super().__init__()
        self._options = options
        self._relays: dict[str, DelayRelay] = {}
        self._slowness: dict[str, _Slowness] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.names: Sequence[str] = options.local.names
        self.peers: Sequence[str] = self.names[1:]

    # The acts of a client.

    @property
    def url(self) -> str:
        return self._endpoint.url

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        for event in self._endpoint.stream("/v1/completions", {**body, "stream": True}):
            choices = event.get("choices")
            for choice in choices if isinstance(choices, list) else ():
                if choice.get("text"):
                    yield str(choice["text"])

    def status(self) -> Mapping[str, Any]:
        status = self._endpoint.get("/status", accept=frozenset({200, 503}))
        if not isinstance(status, dict):
            raise self._endpoint.not_ours("no JSON object")
        return status

    # The events that happen to members.

    def process(self, name: str) -> psutil.Process:
        """Return a member's present process."""
        return psutil.Process(self._processes[name].pid)

    def cpu_s(self, name: str) -> float:
        """Return the core seconds that a member's process has used."""
        times = self.process(name).cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self, name: str) -> int:
        """Return the resident memory of a member's process."""
        return int(self.process(name).memory_info().rss)

    def kill(self, name: str) -> None:
        self.resume(name)
        process = self._processes[name]
        process.kill()
        process.wait()

    def start(self, name: str) -> None:
        self._processes[name] = self._local.start_peer(name, self._options.model)

    def stop(self, name: str) -> None:
        os.kill(self._processes[name].pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """End `stop` and `slow`. Do nothing for a member that runs normally."""
        slowness = self._slowness.pop(name, None)
        if slowness is not None:
            slowness.ended.set()
            assert slowness.thread is not None
            slowness.thread.join()
        self._signal(name, signal.SIGCONT)

    def cut(self, name: str) -> None:
        self._relays[name].cut()

    def mend(self, name: str) -> None:
        self._relays[name].mend()

    def slow(self, name: str) -> None:
        slowness = self._slowness[name] = _Slowness()

        def alternate() -> None:
            while not slowness.ended.is_set():
                self._signal(name, signal.SIGSTOP)
                slowness.ended.wait(_STOPPED_S)
                self._signal(name, signal.SIGCONT)
                slowness.ended.wait(_RUNNING_S)

        slowness.thread = threading.Thread(target=alternate, name=f"slow {name}", daemon=True)
        slowness.thread.start()

    def last_words(self, name: str) -> str:
        """Return the end of a member's log."""
        return "\n".join(self._local.log_file(name).read_text(errors="replace").splitlines()[-20:])

    def _signal(self, name: str, number: signal.Signals) -> None:
        process = self._processes[name]
        # The system does not reuse the id of a process before the process has been waited for.
        if process.poll() is None:
            os.kill(process.pid, number)

    # The start and the end.

    def _start(self) -> None:
        from convoy.bench.hop.delay import DelayRelay

        def publish(name: str, address: Address) -> Address:
            if name not in self.peers:
                return address
            relay = self._relays[name] = DelayRelay(address, 0.0)
            self._stack.callback(relay.close)
            return relay.address

        port = free_port()
        options = replace(self._options.local, serve_port=port, publish=publish)
        self._local = self._stack.enter_context(LocalCluster(options))
        self._stack.callback(self._resume_all)
        self._endpoint = Endpoint(f"http://127.0.0.1:{port}")
        for name in self.peers:
            self.start(name)
        head = self._local.head
        arguments = ("serve", self._options.model, "--config", str(self._local.config_file(head)))
        self._processes[head] = self._local.start(head, *arguments)
        self._stack.callback(end, self._processes[head], _END_S)
        self._wait_until_served()

    def _wait_until_served(self) -> None:
        end_s = time.monotonic() + self._options.start_wait_s
        while time.monotonic() < end_s:
            self._local.check_alive()
            try:
                self._endpoint.get("/health")
            except ConvoyError:
                time.sleep(_POLL_S)
            else:
                return
        raise PeerUnreachable(f"the cluster did not serve within {self._options.start_wait_s:g} s")

    def _resume_all(self) -> None:
        for name in self.peers:
            self.resume(name)


def memory_for(model: str, num_members: int) -> float:
    """Return the GB for each of ``num_members`` that hold the model together. One member fewer could not hold
    it.
    """
    from convoy.model.checkpoints.source import ModelSource
    from convoy.model.kernels.registry import own_form
    from convoy.plan.memory.memory import stage_bytes
    from convoy.plan.span import Span

    spec = ModelSource.resolve(model).spec
    whole = stage_bytes(spec, Span(0, spec.num_layers, output=True), own_form(EXACT))
    return whole / (num_members - 0.5) / 1e9
