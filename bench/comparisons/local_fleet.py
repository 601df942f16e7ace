"""A fleet on this machine: processes of a coordinator, and of providers with one or several members.

The processes are those that a person starts: ``convoy coordinator``, and ``convoy serve MODEL --provide``
with its peers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from convoy.cli.running.endpoint import client_key
from convoy.cluster.children import Started, end
from convoy.errors import ConvoyError, PeerError, PeerUnreachable
from convoy.sdk.endpoint import Endpoint
from convoy.sdk.local_cluster import LocalCluster, LocalOptions
from convoy.transport.ports import free_port

if TYPE_CHECKING:
    from comparisons.fleet.verdict import Books

_END_S = 20.0
_POLL_S = 0.1
_GB_EACH = 1.0
_NICE = 5


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """Count the providers by model. Each has ``members``, and runs ``slots`` requests at once."""

    providers: Mapping[str, int]
    max_waiting: int = 1000
    slots: int = 4
    members: int = 1
    # prompt_micro and completion_micro of each model.
    prices: Mapping[str, int] = field(default_factory=dict)
    start_wait_s: float = 170.0
    say: Callable[[str], None] = lambda _text: None


class LocalFleet(Started):
    """Own the processes of a fleet. Leaving the `with` ends them all, also those killed and started again."""

    def __init__(self, options: FleetOptions) -> None:
        super().__init__()
        self._options = options
        self._port, self._admin_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.directory = Path(tempfile.mkdtemp(prefix="convoy-fleet-"))
        self._stack.callback(shutil.rmtree, self.directory, ignore_errors=True)
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._locals: dict[str, LocalCluster] = {}
        self._heads: dict[str, subprocess.Popen[bytes]] = {}
        self._peers: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._models: dict[str, str] = {}
        self._ports: dict[str, int] = {}

    @property
    def names(self) -> list[str]:
        """Return the providers' names."""
        return list(self._heads)

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self.directory / 'fleet.db'}"

    @property
    def admin(self) -> Endpoint:
        """Return the endpoint for administrators."""
        key = client_key(self.directory / "admin.key")
        return Endpoint(f"http://127.0.0.1:{self._admin_port}", key, server="coordinator")

    def head_url(self, model: str) -> str:
        """Return the URL of a provider that serves ``model``, past the coordinator."""
        name = next(name for name in self._heads if self._models[name] == model)
        return f"http://127.0.0.1:{self._ports[name]}"

    def open_account(self, name: str, credit_micro: int) -> str:
        """Make an account with a key, and return the key."""
        self.admin.post("/accounts", {"name": name, "credit_micro": credit_micro})
        made = self.admin.post("/keys", {"scope": "consumer", "account": name})
        assert isinstance(made, dict), "an object, as the coordinator of this version answers"
        return str(made["key"])

    def status(self) -> dict[str, Any]:
        """Return the status as `convoy coordinator status` shows it."""
        found = self.admin.get("/status")
        assert isinstance(found, dict), "an object, as the coordinator of this version answers"
        return found

    def books(self) -> Books:
        """Return the present contents of the ledger."""
        from comparisons.fleet.verdict import books_of
        from convoy.fleet.books.ledger import Ledger
        from convoy.fleet.books.store import Store

        store = Store(self.database_url)
        try:
            return books_of(Ledger(store, "books"))
        finally:
            store.close()

    # The events that happen to processes.

    def put_coordinator_first(self) -> None:
        """Lower the priority of providers, as if the coordinator had a machine of its own.

        This works on Linux only; elsewhere nothing happens.
        """
        for name, head in self._heads.items():
            for process in (head, *self._peers[name]):
                # Linux gives each thread a priority of its own.
                for thread in Path(f"/proc/{process.pid}/task").glob("*"):
                    os.setpriority(os.PRIO_PROCESS, int(thread.name), _NICE)

    def kill_coordinator(self) -> None:
        assert self._coordinator is not None
        self._coordinator.kill()
        self._coordinator.wait()

    def start_coordinator(self) -> dict[str, Any]:
        """Start the coordinator and return its JSON event once it is ready.

        A second start uses the same ports and the same database.
        """
        log = self.directory / "coordinator.log"
        arguments = ["coordinator", "--port", str(self._port), "--admin-port", str(self._admin_port)]
        arguments += ["--dir", str(self.directory), "--config", str(self._config()), "--json"]
        with log.open("wb") as out:
            self._coordinator = subprocess.Popen(
                [sys.executable, "-m", "convoy", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._stack.callback(end, self._coordinator, _END_S)
        deadline_s = time.monotonic() + self._options.start_wait_s
        while time.monotonic() < deadline_s:
            for line in log.read_text(errors="replace").splitlines():
                if line.startswith('{"event": "ready"'):
                    ready: dict[str, Any] = json.loads(line)
                    return ready
            if self._coordinator.poll() is not None:
                raise PeerError(f"the coordinator ended: {log.read_text(errors='replace').strip()[-300:]}")
            time.sleep(_POLL_S)
        raise PeerUnreachable("the coordinator did not listen in time")

    def kill_provider(self, name: str) -> None:
        """Kill a provider's head, like kill -9."""
        self._heads[name].kill()
        self._heads[name].wait()

    def kill_peer(self, name: str) -> None:
        """Kill the last of a provider's peers, like kill -9."""
        process = self._peers[name].pop()
        process.kill()
        process.wait()

    def last_words(self, name: str) -> str:
        """Return the end of the log of a provider's head."""
        local = self._locals[name]
        return local.log_file(local.head).read_text(errors="replace")[-2000:]

    def wait_registered(self, count: int) -> None:
        """Wait until ``count`` providers are registered.

        Raises `PeerError` for one that ended, or `PeerUnreachable` at the deadline.
        """
        deadline_s = time.monotonic() + self._options.start_wait_s
        said = -1
        while time.monotonic() < deadline_s:
            try:
                there = len(self.status()["providers"])
            except ConvoyError:
                there = 0
            if there != said:
                said = there
                self._options.say(f"{there} of {count} providers are registered")
            if there >= count:
                return
            for local in self._locals.values():
                if there < count <= len(self._heads):
                    local.check_alive()
            time.sleep(_POLL_S)
        raise PeerUnreachable(f"{said} of {count} providers came in {self._options.start_wait_s:g} s")

    # The start.

    def _start(self) -> None:
        self.start_coordinator()
        for model, count in self._options.providers.items():
            for _ in range(count):
                self._start_provider(f"provider-{len(self._heads) + 1}", model)
        self.wait_registered(len(self._heads))

    def _start_provider(self, name: str, model: str) -> None:
        from convoy.crypto.identity import Identity

        options = self._options
        port = self._ports[name] = free_port()
        local = LocalCluster(
            LocalOptions(
                num_members=options.members,
                num_threads=1,
                serve_port=port,
                engine={"max_batch": options.slots},
                memory_gb=_GB_EACH,
                sharing={"parallel": "pipeline"} if options.members > 1 else {},
            )
        )
        self._locals[name] = self._stack.enter_context(local)
        identity = Identity.load(local.directory / local.head)
        self.admin.post("/providers", {"identity": identity.public_key.hex(), "name": name})
        self._models[name] = model
        self._peers[name] = [local.start_peer(peer, model) for peer in local.names[1:]]
        dial = f"ws://127.0.0.1:{self._port}"
        config = str(local.config_file(local.head))
        head = local.start(local.head, "serve", model, "--config", config, "--provide", dial)
        self._heads[name] = head

    def _config(self) -> Path:
        options = self._options
        waiting = options.max_waiting
        tables = {
            "queue": {"max_waiting": waiting, "max_per_account": waiting},
            "model": [{"name": model, **options.prices} for model in options.providers],
        }
        file = self.directory / "coordinator.toml"
        file.write_text(tomli_w.dumps(tables), encoding="utf-8")
        return file
