"""A whole cluster on this machine: an identity each, a signed roster, and every peer a process of its own.

The peers end when this process does, however it ends: each reads its standard input, which is a pipe from
here, and goes when that closes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from convoy.cli.local.members import local_names, spans_by_name
from convoy.cli.local.pin import Cores, pin_process
from convoy.cli.running.start import heavy_rooms
from convoy.cli.show.output import print_note
from convoy.cluster.children import Started, end
from convoy.config.settings import Config, EngineConfig, PlanConfig, load_config, override
from convoy.errors import ConvoyError, PeerError
from convoy.transport.ports import free_ports

if TYPE_CHECKING:
    from convoy.plan.spec.model import ModelSpec

Address = tuple[str, int]
_STOP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """What all members of a local cluster share. ``num_threads`` None shares the cores out evenly.

    ``layers`` are the texts of ``--layers``; ``cores`` are each member's own, None leaves them to the system.
    ``memory_gb`` is each member's, None shares out what is free. ``device`` is dealt out to the members, see
    `model.device.deal_devices`. ``publish`` says where others reach a member
    that listens at an address: a relay's, for a bench of what fails between them.
    """

    num_members: int
    layers: Sequence[str] | None = None
    kernel: str = "auto"
    num_threads: int | None = None
    serve_port: int = 0
    engine: dict[str, int] = field(default_factory=dict)
    cores: tuple[Cores, ...] | None = None
    memory_gb: float | None = None
    device: str = "cpu"
    publish: Callable[[str, Address], Address] = lambda _name, address: address
    sharing: dict[str, Any] = field(default_factory=dict)  # keys of [plan]: parallel, ranks

    @property
    def head_cores(self) -> Cores | None:
        """For `pin.pinned`, where the head runs in this process."""
        return None if self.cores is None else self.cores[0]

    @property
    def threads(self) -> int:
        """Of each member."""
        if self.num_threads:
            return self.num_threads
        shared = max(1, (os.cpu_count() or 1) // self.num_members)
        return shared if self.cores is None else len(self.cores[0])

    @property
    def devices(self) -> list[str]:
        """Of each member. Raises UsageError."""
        if self.device == "cpu" or (self.device == "auto" and self.num_members == 1):
            return [self.device] * self.num_members  # a lone member looks for itself
        with heavy_rooms(print_note):  # torch, which takes seconds
            from convoy.model.device import deal_devices

        return deal_devices(self.device, self.num_members, self.kernel)

    @property
    def names(self) -> tuple[str, ...]:
        return local_names(self.num_members)

    @property
    def spans(self) -> dict[str, str] | None:
        return spans_by_name(self.layers, self.names)

    def check(self, spec: ModelSpec) -> None:
        """Raises what `plan.placement.ways.choose_way` raises for these spans, before anything is started.

        And what `HeadOptions.check` raises for the flags of the engine.
        """
        from convoy.cli.running.member import head_options
        from convoy.plan.offer import MemberOffer
        from convoy.plan.placement.ways import choose_way, find_ways

        plan = override(PlanConfig(), **self.sharing)
        asked = head_options(Config(engine=override(EngineConfig(), **self.engine), plan=plan))
        asked.check()
        asked.check_context(spec)
        offers = [MemberOffer(name, 1 << 62, head=name == self.names[0]) for name in self.names]
        choose_way(asked.parallel, find_ways(spec, offers, self.spans, ranks=asked.ranks))
        self.devices  # noqa: B018 - raises UsageError for what is not here; last, because torch takes seconds


class LocalCluster(Started):
    """Files in a temporary directory and processes; leaving the `with` ends and removes both."""

    def __init__(self, options: LocalOptions) -> None:
        super().__init__()
        self.names = options.names
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.directory = Path(tempfile.mkdtemp(prefix="convoy-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self._stack.callback(self._stop_all)

    @property
    def head(self) -> str:
        return self.names[0]

    def config_file(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    def config(self, name: str) -> Config:
        return load_config(self.config_file(name))

    def start_peers(self, model: str) -> None:
        """`convoy join` for every member but the head."""
        for name in self.names[1:]:
            self.start_peer(name, model)

    def start_peer(self, name: str, model: str) -> subprocess.Popen[bytes]:
        """One of them; also once more, after it ended."""
        file = str(self.config_file(name))
        return self.start(name, "join", "--config", file, "--model", model, "--until-stdin-closes")

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A `convoy` command as a process whose output goes to a log beside its configuration."""
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "convoy", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the others in order
            )
        self._processes[name] = process
        if self._options.cores is not None:
            pin_process(process.pid, self._options.cores[self.names.index(name)])
        return process

    def log_file(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def check_alive(self) -> None:
        """Raises `PeerError` with a dead member's own last words."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise PeerError(
                    f"{name} ended with exit status {process.returncode}: {self._last_error(name)}"
                )

    def explain(self, error: ConvoyError) -> ConvoyError:
        """The error of a member that died, where one did, in place of its consequence here."""
        try:
            self.check_alive()
        except PeerError as dead:
            return dead
        return error

    def _last_error(self, name: str) -> str:
        lines = self.log_file(name).read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        return (errors or lines or ["no output"])[-1]

    def _stop_all(self) -> None:
        for process in self._processes.values():
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            end(process, _STOP_WAIT_S)  # a head does not read its standard input

    def _start(self) -> None:
        """Only the files: `start_peers` and `start` make processes."""
        from convoy.crypto.identity import Identity, OperatorKey
        from convoy.trust.roster.card import member_of
        from convoy.trust.roster.roster import make_roster, sign_roster

        operator = OperatorKey.generate()
        members = []
        listening: dict[str, Address] = {}
        for name, port in zip(self.names, free_ports(len(self.names)), strict=True):
            identity = Identity.generate()
            identity.save(self.directory / name)
            listening[name] = ("127.0.0.1", port)
            address = self._options.publish(name, listening[name])
            members.append(member_of(name, identity, address, head=name == self.head))
        roster = self.directory / "roster.toml"
        roster.write_bytes(sign_roster(make_roster("local", members), operator))
        for member in members:
            text = tomli_w.dumps(self._tables(member.name, listening[member.name], operator.public_key))
            self.config_file(member.name).write_text(text)

    def _tables(self, name: str, address: Address, operator_key: bytes) -> dict[str, object]:
        devices = self._options.devices
        device = devices[self.names.index(name)]
        memory_gb = self._options.memory_gb or _share_bytes(devices, device) / 1e9
        tables: dict[str, object] = {
            "cluster": {
                "name": name,
                "identity": str(self.directory / name),
                "roster": str(self.directory / "roster.toml"),
                "operator_key": operator_key.hex(),
            },
            "listen": {"host": address[0], "port": address[1]},
            "serve": {"port": self._options.serve_port},
            "model": {
                "kernel": _kernel_on(device, self._options.kernel),
                "num_threads": self._options.threads,
                "memory_gb": memory_gb,
                "device": device,
            },
            "engine": self._options.engine,
        }
        plan = dict(self._options.sharing)
        if self._options.spans is not None:
            plan["layers"] = self._options.spans
        return tables | ({"plan": plan} if plan else {})


def _kernel_on(device: str, kernel: str) -> str:
    """The kernel of a member on ``device``; beside members on hosts a device takes what it can run."""
    if device == "auto" or device.startswith("cpu"):
        return kernel
    from convoy.model.device import runs_on_cuda

    return kernel if runs_on_cuda(kernel) else "auto"


def _share_bytes(devices: Sequence[str], device: str) -> float:
    """Of what is free, what one of those that compute on ``device`` may take."""
    if device == "auto":
        return 0.0  # it looks for itself
    if not device.startswith("cpu"):
        from convoy.model.device import device_memory_bytes

        return device_memory_bytes(tuple(re.split("[,+]", device))) / devices.count(device)
    import psutil

    return float(psutil.virtual_memory().available) * 0.8 / devices.count(device)
