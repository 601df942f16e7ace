"""A cluster on this machine: an identity for each member, a signed roster, and a process for each peer.

The peers end when this process ends, in whatever way. Each peer reads its standard input, which is a pipe
from this process, and ends when the pipe closes.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import tomli_w

from convoy.cluster.children import Started, end
from convoy.config.settings import Config, load_config, override
from convoy.config.table import EngineConfig, PlanConfig
from convoy.config.temporary_folder import temporary_folder
from convoy.errors import ConvoyError, PeerError
from convoy.model.library import heavy_rooms
from convoy.sdk.names import local_names, spans_by_name
from convoy.sdk.options import Note, head_options, unheard
from convoy.transport.ports import free_ports

if TYPE_CHECKING:
    from convoy.plan.spec.model import ModelSpec

Address = tuple[str, int]
Cores = tuple[int, ...]
_STOP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Hold the options that all members of a local cluster share.

    ``layers`` are the texts of ``--layers``. ``num_threads`` None shares the cores out evenly. ``cores`` are
    those of each member; None leaves them to the system. ``memory_gb`` is for each member; None shares out
    the free memory. ``device`` is dealt out to the members, see `model.device.deal_devices`. ``publish`` maps
    the address at which a member listens to the one that others dial: a relay's, in a bench of link failures.
    """

    num_members: int
    layers: Sequence[str] | None = None
    kernel: str = "auto"
    num_threads: int | None = None
    serve_port: int = 0
    engine: dict[str, Any] = field(default_factory=dict)
    cores: tuple[Cores, ...] | None = None
    memory_gb: float | None = None
    device: str = "cpu"
    publish: Callable[[str, Address], Address] = lambda _name, address: address
    # Keys of [plan]: parallel and ranks.
    sharing: dict[str, Any] = field(default_factory=dict)
    # Told that torch is being loaded.
    note: Note = unheard

    @property
    def head_cores(self) -> Cores | None:
        """Return the head's cores for `pin.pinned`, if the head runs in this process."""
        return None if self.cores is None else self.cores[0]

    @property
    def threads(self) -> int:
        """Return the number of threads of each member."""
        if self.num_threads:
            return self.num_threads
        shared = max(1, (os.cpu_count() or 1) // self.num_members)
        return shared if self.cores is None else len(self.cores[0])

    @property
    def devices(self) -> list[str]:
        """Return the device of each member. Raises UsageError."""
        if self.device == "cpu" or (self.device == "auto" and self.num_members == 1):
            # A lone member looks for devices itself.
            return [self.device] * self.num_members
        # This import loads torch, which takes seconds.
        with heavy_rooms(self.note):
            from convoy.model.device import deal_devices

        return deal_devices(self.device, self.num_members, self.kernel)

    @property
    def names(self) -> tuple[str, ...]:
        return local_names(self.num_members)

    @property
    def spans(self) -> dict[str, str] | None:
        return spans_by_name(self.layers, self.names)

    def check(self, spec: ModelSpec) -> None:
        """Check spans and flags before anything is started.

        Raises the errors of `plan.placement.modes.choose_placement` for the spans, those of
        `HeadOptions.check` for the flags of the engine, and ModelError for K/V that the model cannot have so.
        """
        from convoy.plan.offer import MemberOffer
        from convoy.plan.placement.modes import choose_placement, find_placements

        plan = override(PlanConfig(), **self.sharing)
        asked = head_options(Config(engine=override(EngineConfig(), **self.engine), plan=plan))
        asked.check()
        asked.check_context(spec)
        spec.with_kv_dtype(asked.kv_dtype)
        # Memory does not count here: this check is for the spans and flags alone.
        offers = [MemberOffer(name, 1 << 62, head=name == self.names[0]) for name in self.names]
        choose_placement(asked.parallel, find_placements(spec, offers, self.spans, ranks=asked.ranks))
        # Raises UsageError for a device that this machine lacks. Last, because torch takes seconds to load.
        self.devices  # noqa: B018


class LocalCluster(Started):
    """Own the processes of a cluster and a temporary directory. Leaving the `with` ends and removes them."""

    def __init__(self, options: LocalOptions) -> None:
        super().__init__()
        self.names = options.names
        self._options = options
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._is_ending = False
        self.directory = self._stack.enter_context(temporary_folder())
        self._stack.callback(self._stop_all)

    @property
    def head(self) -> str:
        return self.names[0]

    @property
    def processes(self) -> Mapping[str, subprocess.Popen[bytes]]:
        """Return the newest process of each member."""
        return self._processes

    def config_file(self, name: str) -> Path:
        return self.directory / f"{name}.toml"

    def config(self, name: str) -> Config:
        return load_config(self.config_file(name))

    def start_peers(self, model: str) -> None:
        """Run `convoy join` for every member but the head."""
        for name in self.names[1:]:
            self.start_peer(name, model)

    def start_peer(self, name: str, model: str) -> subprocess.Popen[bytes]:
        """Start one peer. A peer that ended can be started again."""
        file = str(self.config_file(name))
        return self.start(name, "join", "--config", file, "--model", model, "--until-stdin-closes")

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a `convoy` command as a process. Its output goes to a log beside its configuration."""
        with self.log_file(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "convoy", *arguments],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C reaches this process alone, which then ends the others in order.
                start_new_session=True,
            )
        self._processes[name] = process
        if self._options.cores is not None:
            pin_process(process.pid, self._options.cores[self.names.index(name)])
        return process

    def log_file(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def check_alive(self) -> None:
        """Raise `PeerError` with the last error of a member that has ended."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise PeerError(
                    f"{name} ended with exit status {process.returncode}: {self._last_error(name)}"
                )

    def tell_ends(self, note: Note) -> None:
        """Tell ``note`` of each member that ends before the cluster does. None is started again."""
        for name, process in self._processes.items():
            threading.Thread(target=self._tell_end, args=(name, process, note), daemon=True).start()

    def _tell_end(self, name: str, process: subprocess.Popen[bytes], note: Note) -> None:
        code = process.wait()
        if not self._is_ending:
            how = f"was killed by signal {-code}" if code < 0 else f"ended: {self._last_error(name)}"
            note(f"{name} {how}; it does not come back before this command is started again")

    def reraise(self, error: ConvoyError) -> NoReturn:
        """Raise the error of a member that ended, if one did, in place of its consequence ``error``.

        Otherwise ``error`` itself goes on, with its own cause: a port that is taken has an exit code for it.
        """
        try:
            self.check_alive()
        except PeerError as dead:
            raise dead from error
        raise error

    def _last_error(self, name: str) -> str:
        lines = self.log_file(name).read_text(errors="replace").splitlines()
        errors = [line.removeprefix("error:").strip() for line in lines if line.startswith("error:")]
        # Without a reported error, the last line is the best explanation.
        return (errors or lines or ["no output"])[-1]

    def _stop_all(self) -> None:
        self._is_ending = True
        for process in self._processes.values():
            # Close every pipe first, so that all peers end at the same time.
            if process.stdin is not None:
                process.stdin.close()
        for process in self._processes.values():
            # A head does not read its standard input, so it needs a signal.
            end(process, _STOP_WAIT_S)

    def _start(self) -> None:
        """Write the files. `start_peers` and `start` make processes."""
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


def pin_process(process_id: int, cores: Cores) -> None:
    """Pin a process right after its start, on Linux. Threads that it starts later inherit the cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process_id, cores)


def _kernel_on(device: str, kernel: str) -> str:
    """Return the kernel of a member on ``device``. A device takes "auto" if it cannot run ``kernel``."""
    if device == "auto" or device.startswith("cpu"):
        return kernel
    from convoy.model.device import runs_on

    return kernel if runs_on(device, kernel) else "auto"


def _share_bytes(devices: Sequence[str], device: str) -> float:
    """Return the share of free memory for one of the members that compute on ``device``, in bytes."""
    if device == "auto":
        # The member measures its own memory.
        return 0.0
    if not device.startswith("cpu"):
        from convoy.model.device import device_memory_bytes

        return device_memory_bytes(tuple(re.split("[,+]", device))) / devices.count(device)
    from convoy.plan.memory.free import free_bytes
    from convoy.plan.memory.memory import MEMORY_SHARE

    return free_bytes(devices.count(device)) * MEMORY_SHARE
