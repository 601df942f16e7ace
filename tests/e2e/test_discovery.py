"""Two machines with wrong addresses in their roster find each other on the local network, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from convoy.crypto.identity import Identity
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster
from support.members import OPERATOR
from support.namespaces import Machine, two_machines, why_no_namespaces

NO_NAMESPACES = why_no_namespaces()
pytestmark = [
    pytest.mark.skipif(NO_NAMESPACES is not None, reason=str(NO_NAMESPACES)),
    pytest.mark.slow,
]
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).resolve().parents[2] / "src"),
}
WAIT_S = 60.0
NOBODY = "192.0.2.78"  # of the machines' own network, and unused


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def write_members(folder: Path, listen: str) -> dict[str, Path]:
    """Write a convoy.toml for alpha (the head) and beta. No machine has beta's address in the roster."""
    identities = {name: Identity.generate() for name in ("alpha", "beta")}
    listed = [
        member_of(name, identity, (NOBODY, 7777), head=name == "alpha")
        for name, identity in identities.items()
    ]
    (folder / "roster.toml").write_bytes(sign_roster(make_roster("found", listed), OPERATOR))
    files = {}
    for name, identity in identities.items():
        identity.save(folder / name)
        files[name] = folder / f"{name}.toml"
        files[name].write_text(
            f'[cluster]\nname = "{name}"\nidentity = "{name}"\nroster = "roster.toml"\n'
            f'operator_key = "{OPERATOR.public_key.hex()}"\n'
            f'[listen]\nhost = "{listen}"\n[serve]\nport = 0\n[plan]\nwait_s = 40\n'
            "[model]\nnum_threads = 1\nmemory_gb = 1.0\n"
        )
    return files


@contextlib.contextmanager
def running(machine: Machine, *arguments: str) -> Iterator[IO[str]]:
    """Run a convoy command there, and yield its standard output."""
    process = subprocess.Popen(
        machine.run_in(sys.executable, "-m", "convoy", *arguments),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout
    finally:
        process.terminate()
        process.wait(WAIT_S)


def without_ipv4(machine: Machine) -> None:
    """Leave it the link-local IPv6 address alone, once that may be used."""
    subprocess.run(machine.run_in("ip", "-4", "address", "flush", "dev", "eth0"), check=True)
    until_s = time.monotonic() + WAIT_S
    while True:
        shown = subprocess.run(
            machine.run_in("ip", "-6", "address", "show", "dev", "eth0"),
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        if "fe80" in shown and "tentative" not in shown:
            return
        assert time.monotonic() < until_s, shown
        time.sleep(0.1)


def join(files: dict[str, Path]) -> list[str]:
    return ["join", "--config", str(files["beta"]), "--discover", "--json"]


def serve(files: dict[str, Path], *flags: str) -> list[str]:
    return ["serve", "demo-mini", "--config", str(files["alpha"]), "--json", *flags]


def first_value(printed: IO[str]) -> dict[str, Any]:
    """Return the first JSON value, over however many lines."""
    text = ""
    for line in printed:
        text += line
        with contextlib.suppress(ValueError):
            value: dict[str, Any] = json.loads(text)
            return value
    raise AssertionError(text)


def wait_for_event(said: IO[str], kind: str) -> None:
    """Wait for an event, and pass over all before it."""
    assert any(json.loads(line)["kind"] == kind for line in said)


def assert_both_hold_stages(answer: dict[str, Any]) -> None:
    assert answer["status"]["ready"], answer
    assert {stage["member"] for stage in answer["status"]["stages"]} == {"alpha", "beta"}


@pytest.mark.long
def test_members_with_wrong_addresses_in_the_roster_meet_by_discovery_alone(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    files = write_members(tmp_path, "0.0.0.0")  # noqa: S104
    text = files["alpha"].read_text()
    with running(machines[1], *join(files)) as said:
        wait_for_event(said, "listening")
        files["alpha"].write_text(text.replace("wait_s = 40", "wait_s = 2"))
        with running(machines[0], *serve(files)) as printed:
            # It can hold the model, so it starts without the peer that it cannot reach.
            assert [stage["member"] for stage in first_value(printed)["status"]["stages"]] == ["alpha"]
        files["alpha"].write_text(text)
        with running(machines[0], *serve(files, "--discover")) as printed:
            assert_both_hold_stages(first_value(printed))


@pytest.mark.long
def test_a_member_is_found_where_there_is_ipv6_alone(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    for machine in machines:
        without_ipv4(machine)
    files = write_members(tmp_path, "::")
    with (
        running(machines[1], *join(files)) as said,
        running(machines[0], *serve(files, "--discover")) as printed,
    ):
        wait_for_event(said, "listening")
        assert_both_hold_stages(first_value(printed))
