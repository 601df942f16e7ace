"""Two network namespaces joined by a pair of virtual interfaces: to the network they are two machines."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_IP = shutil.which("ip") or "/sbin/ip"


def why_no_namespaces() -> str | None:
    """Return why namespaces are not available here, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path(_IP).exists():
        return "network namespaces need the command ip (iproute2)"
    name = f"cv-try-{os.getpid()}"
    command = [_IP, "netns", "add", name]
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode != 0:
        return f"no network namespace can be made here: {tried.stderr.strip()}"
    _ip("netns", "delete", name)
    return None


@dataclass(frozen=True, slots=True)
class Machine:
    """Represent a namespace with one address beside loopback."""

    name: str
    address: str

    def end_processes(self) -> None:
        """Kill every process there at once, as a loss of power does."""
        listed = subprocess.run([_IP, "netns", "pids", self.name], check=True, capture_output=True, text=True)
        for pid in listed.stdout.split():
            # It may have ended with its parent.
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def run_in(self, *command: str) -> list[str]:
        """Return the command line that runs ``command`` there."""
        return [_IP, "netns", "exec", self.name, *command]


@contextmanager
def two_machines() -> Iterator[tuple[Machine, Machine]]:
    """Make 192.0.2.1 and 192.0.2.2 (RFC 5737), which reach only each other."""
    first, second = (
        Machine(f"cv-{letter}-{os.getpid()}", f"192.0.2.{number}") for number, letter in enumerate("ab", 1)
    )
    with ExitStack() as stack:
        for machine in (first, second):
            _ip("netns", "add", machine.name)
            stack.callback(_ip, "netns", "delete", machine.name)
        _ip("link", "add", "eth0", "netns", first.name, "type", "veth", "peer", "eth0", "netns", second.name)
        for machine in (first, second):
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for interface in ("lo", "eth0"):
                _ip("-n", machine.name, "link", "set", interface, "up")
        yield first, second


def _ip(*arguments: str) -> None:
    subprocess.run([_IP, *arguments], check=True, capture_output=True)
