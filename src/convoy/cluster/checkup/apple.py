"""Describe a Mac for `convoy doctor`, from what its own commands print.

The functions that read texts are pure. They were written from the commands' manuals, and no Mac has run them
yet (docs/apple.md): a line that is missing or reads otherwise is left out, and never ends a checkup.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from convoy.cluster.checkup.finding import Finding, ok, warn
from convoy.plan.memory.memory import format_bytes

Run = Callable[[Sequence[str]], str]

_SYSCTL = ("machdep.cpu.brand_string", "hw.memsize", "iogpu.wired_limit_mb")
_FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
_COMMAND_S = 5.0


@dataclass(frozen=True)
class Mac:
    """Hold what a Mac says of itself. Fields that it does not tell are empty or 0."""

    chip: str
    memory_bytes: int
    # What an administrator set; 0: the system's own limit.
    wired_limit_bytes: int
    version: str
    # The interface of the Thunderbolt bridge and its IPv4 addresses.
    bridge: str
    bridge_addresses: tuple[str, ...]
    # None: unknown.
    has_firewall: bool | None


def read_sysctl(text: str) -> dict[str, str]:
    """Return names and values of the lines ``name: value``."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def read_ports(text: str) -> str:
    """Return the interface of the Thunderbolt bridge in ``networksetup -listallhardwareports``, or ""."""
    found = re.search(r"^Hardware Port: Thunderbolt Bridge\s*\nDevice: (\w+)", text, re.MULTILINE)
    return found.group(1) if found else ""


def read_addresses(text: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of one interface in ``ifconfig``."""
    return tuple(re.findall(r"^\s+inet (\d+\.\d+\.\d+\.\d+) ", text, re.MULTILINE))


def read_firewall(text: str) -> bool | None:
    """Return whether ``socketfilterfw --getglobalstate`` says that the firewall is on; None: neither."""
    found = re.search(r"State = (\d)", text)
    return None if found is None else found.group(1) != "0"


def read_mac(run: Run) -> Mac:
    """Return what the commands tell; ``run`` returns the output of one, or "" where it fails."""
    values = read_sysctl(run(("sysctl", *_SYSCTL)))
    bridge = read_ports(run(("networksetup", "-listallhardwareports")))
    return Mac(
        values.get("machdep.cpu.brand_string", ""),
        _number(values.get("hw.memsize", "")),
        _number(values.get("iogpu.wired_limit_mb", "")) << 20,
        run(("sw_vers", "-productVersion")).strip(),
        bridge,
        read_addresses(run(("ifconfig", bridge))) if bridge else (),
        read_firewall(run((_FIREWALL, "--getglobalstate"))),
    )


def check_mac(run: Run | None = None) -> Iterator[Finding]:
    """List chip, memory, wired limit and version, the Thunderbolt bridge, and the firewall."""
    mac = read_mac(run or run_command)
    limit = "the system's own" if not mac.wired_limit_bytes else format_bytes(mac.wired_limit_bytes)
    yield ok(
        f"{mac.chip or 'a Mac'} with {format_bytes(mac.memory_bytes)}, macOS {mac.version or 'unknown'}; "
        f"wired limit of the GPU: {limit}"
    )
    if mac.bridge_addresses:
        yield ok(f"the Thunderbolt bridge {mac.bridge} has {', '.join(mac.bridge_addresses)}")
    elif mac.bridge:
        yield ok(f"the Thunderbolt bridge {mac.bridge} has no address: no other Mac is connected by a cable")
    if mac.has_firewall:
        yield warn(
            "the firewall of macOS is on: it may block members that connect to this one",
            "allow incoming connections for Python in System Settings, Network, Firewall",
        )
    elif mac.has_firewall is False:
        yield ok("the firewall of macOS is off")


def run_command(command: Sequence[str]) -> str:
    """Return the output of a command, or "" if it is missing, fails or takes too long."""
    try:
        found = subprocess.run(list(command), capture_output=True, check=True, timeout=_COMMAND_S, text=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return found.stdout


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
