"""Two machines whose roster has wrong addresses: they find each other on the local network, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from convoy.crypto.identity import Identity
from convoy.trust.card import member_of
from convoy.trust.roster import make_roster, sign_roster
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
NOBODY = "192.0.2.78"  # of the machines' own network, and nobody has it


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    with two_machines() as both:
        yield both


def write_members(folder: Path, listen: str) -> dict[str, Path]:
    """A convoy.toml for alpha (the head) and beta, whose address in the roster is nobody's."""
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
    """A convoy command there; its standard output."""
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


@pytest.mark.parametrize("family", ["ipv4", "ipv6-link-local"])
def test_a_member_with_a_wrong_address_in_the_roster_is_found(
    machines: tuple[Machine, Machine], tmp_path: Path, family: str
) -> None:
    if family != "ipv4":
        for machine in machines:
            without_ipv4(machine)
    files = write_members(tmp_path, "0.0.0.0" if family == "ipv4" else "::")  # noqa: S104
    join = ["join", "--config", str(files["beta"]), "--discover", "--json"]
    serve = ["serve", "demo-mini", "--config", str(files["alpha"]), "--discover", "--json"]
    with running(machines[1], *join) as said:
        assert json.loads(said.readline())["kind"] == "listening"
        with running(machines[0], *serve) as printed:
            text = ""
            for line in printed:
                text += line
                with contextlib.suppress(ValueError):
                    status = json.loads(text)["status"]
                    break
            assert status["ready"], text
            assert {stage["member"] for stage in status["stages"]} == {"alpha", "beta"}


def test_without_discovery_the_same_members_do_not_meet(
    machines: tuple[Machine, Machine], tmp_path: Path
) -> None:
    files = write_members(tmp_path, "0.0.0.0")  # noqa: S104
    files["alpha"].write_text(files["alpha"].read_text().replace("wait_s = 40", "wait_s = 4"))
    with running(machines[1], "join", "--config", str(files["beta"]), "--discover", "--json") as said:
        assert json.loads(said.readline())["kind"] == "listening"
        with running(machines[0], "serve", "demo-mini", "--config", str(files["alpha"]), "--json") as printed:
            error = json.loads(printed.read())["error"]
    assert error["type"] == "PeerUnreachable"
    assert f"beta at {NOBODY}:7777 did not answer" in error["message"]
