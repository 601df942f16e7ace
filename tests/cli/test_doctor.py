"""``convoy doctor`` as a person runs it: its output and its exit code."""

from __future__ import annotations

import datetime
import json
import re
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_convoy, run_here
from convoy.crypto.identity import Identity, OperatorKey
from convoy.transport.ports import free_ports
from convoy.trust.roster.accepted import Accepted, AcceptedFile
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster
from support.examined import measure_once


class Home:
    """Hold two members' files in one folder; neither member runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.operator = OperatorKey.generate()
        self.ports = free_ports(3)
        self.members = []
        for index, name in enumerate(("alpha", "beta")):
            identity = Identity.generate()
            identity.save(folder / name)
            address = ("127.0.0.1", self.ports[index])
            self.members.append(member_of(name, identity, address, head=name == "alpha"))
            (folder / f"{name}.toml").write_text(
                f'[cluster]\nname = "{name}"\nidentity = "{name}"\nroster = "roster.toml"\n'
                f'operator_key = "{self.operator.public_key.hex()}"\n[serve]\nport = {self.ports[2]}\n'
            )
        self.sign()

    def signed(self, *, epoch: int = 1, days: int = 30, ago: int = 0) -> bytes:
        start = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=ago)
        lifetime = datetime.timedelta(days=days)
        roster = make_roster("home", self.members, epoch=epoch, not_before=start, lifetime=lifetime)
        return sign_roster(roster, self.operator)

    def sign(self, **options: int) -> None:
        (self.folder / "roster.toml").write_bytes(self.signed(**options))

    def doctor(self, name: str) -> tuple[int, dict[str, Any], dict[str, list[dict[str, str]]]]:
        """Exit code, the whole answer, and its findings by check."""
        done = run_here(["doctor", "--config", f"{name}.toml", "--json"], self.folder)
        answer: dict[str, Any] = json.loads(done.stdout)
        by_check: dict[str, list[dict[str, str]]] = {}
        for finding in answer["findings"]:
            by_check.setdefault(finding["check"], []).append(finding)
        return done.returncode, answer, by_check


@pytest.fixture(scope="module", autouse=True)
def measured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        measure_once(patch)
        yield


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def test_without_a_configuration_it_looks_at_the_machine_alone(tmp_path: Path) -> None:
    done = run_here(["doctor"], tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("ok    python     Python 3.")
    assert {line.split()[1] for line in lines if line[:4] in {"ok  ", "warn"}} >= {
        "ciphers",
        "memory",
        "disk",
    }
    speed = next(line for line in lines if line.split()[:2] == ["ok", "speed"])
    assert re.search(r"reads [\d.]+ GB/s and multiplies \d+ GFLOP/s .* --speed NAME=[\d.e+,]+`$", speed)
    assert speed.partition("NAME=")[2].count(",") == 7, "all that a plan can use"
    assert not any("roster of" in line for line in lines)
    assert lines[-1].endswith("0 to mend")
    assert done.returncode == 0


def test_a_member_whose_peer_is_not_there_yet(home: Home) -> None:
    code, answer, found = home.doctor("alpha")
    assert code == 1
    assert not answer["healthy"]
    assert [finding["level"] for finding in found["roster"]] == ["ok", "ok"]
    assert {found[name][0]["level"] for name in ("keys", "clock", "listed", "address", "port", "http")} == {
        "ok"
    }
    assert found["peers"][0]["level"] == "fail"
    assert found["peers"][0]["what"].startswith(f"beta at 127.0.0.1:{home.ports[1]} could not be reached")
    assert answer["counts"]["fail"] == 1


def test_a_peer_is_healthy_before_its_head_comes(home: Home) -> None:
    code, answer, found = home.doctor("beta")
    assert [finding for finding in answer["findings"] if finding["level"] == "fail"] == []
    assert (code, answer["healthy"]) == (0, True)
    assert found["peers"][0]["what"].startswith("alpha does not listen now, as heads do not")
    assert "http" not in found


def test_two_members_at_one_address_are_named_and_not_taken_for_each_other(home: Home) -> None:
    home.members[1] = replace(home.members[1], address=home.members[0].address)
    home.sign()
    with socket.create_server(home.members[0].address) as beta:
        for name in ("alpha", "beta"):
            code, answer, found = home.doctor(name)
            assert (code, answer["counts"]["fail"]) == (1, 1)
            wrong = next(finding for finding in found["address"] if finding["level"] == "fail")
            where = f"127.0.0.1:{home.ports[0]}"
            assert wrong["what"].startswith(f"alpha and beta both have the address {where}: ")
            assert "convoy join - --port PORT" in wrong["mend"]
            assert not found.keys() & {"port", "peers"}
        beta.setblocking(False)
        with pytest.raises(BlockingIOError):  # no caller came that had to be refused
            beta.accept()


def test_a_roster_that_was_signed_with_one_address_twice_can_be_mended(home: Home) -> None:
    home.members[1] = replace(home.members[1], address=home.members[0].address)
    home.sign()
    home.operator.save(home.folder / ".convoy/operator")
    again = run_here(["roster", "sign"], home.folder)
    assert again.returncode == 78
    assert "error: alpha and beta both have the address 127.0.0.1:" in again.stderr
    assert run_here(["roster", "remove", "beta"], home.folder).returncode == 0
    assert run_here(["roster", "sign"], home.folder).returncode == 0


def test_all_checks_are_made_though_the_first_fails(home: Home) -> None:
    (home.folder / "alpha" / "identity.key").chmod(0o644)
    code, _, found = home.doctor("alpha")
    assert code == 1
    key = home.folder / "alpha" / "identity.key"
    assert (
        found["keys"][0]["mend"].endswith("chmod 600 alpha/identity.key")
        or str(key) in found["keys"][0]["mend"]
    )
    assert found["roster"][0]["level"] == "ok"
    assert found["peers"][0]["what"] == "no peer was dialled: keys and roster come first"
    assert "model" in found


@pytest.mark.long
def test_a_person_sees_what_mends_it_and_what_is_going_on(home: Home) -> None:
    (home.folder / "alpha" / "identity.key").chmod(0o644)
    done = run_convoy(["doctor", "--config", "alpha.toml"], home.folder)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    wrong = next(i for i, line in enumerate(lines) if line.startswith("fail  keys"))
    assert "has mode 0644, expected 0600" in lines[wrong]
    assert lines[wrong + 1].split()[:3] == ["mend", "chmod", "600"]
    assert lines[-1].endswith(" to look at, 1 to mend")
    assert "looking addresses up ..." in done.stderr


def test_an_expired_roster_is_told_and_the_rest_is_still_looked_at(home: Home) -> None:
    home.sign(days=30, ago=40)
    code, _, found = home.doctor("alpha")
    assert code == 1
    assert [finding["level"] for finding in found["roster"]] == ["ok", "fail"]
    assert "10 days ago" in found["roster"][1]["what"]
    assert "convoy roster sign" in found["roster"][1]["mend"]
    assert found["listed"][0]["level"] == "ok"


def test_a_roster_that_somebody_changed_is_told(home: Home) -> None:
    file = home.folder / "roster.toml"
    file.write_bytes(file.read_bytes().replace(b"epoch = 1", b"epoch = 9"))
    code, _, found = home.doctor("alpha")
    assert code == 1
    assert found["roster"][0]["what"] == "the roster was changed after it was signed"
    assert "peers" not in found
    assert "model" in found


@pytest.mark.long
def test_a_wrong_key_in_the_roster_is_told(home: Home) -> None:
    home.members[0] = member_of("alpha", Identity.generate(), home.members[0].address, head=True)
    home.sign(epoch=2)
    code, _, found = home.doctor("alpha")
    assert code == 1
    assert [finding["level"] for finding in found["listed"]] == ["fail", "fail"]
    assert "the roster lists identity" in found["listed"][0]["what"]


@pytest.mark.long
def test_a_roster_accepted_before_counts_and_nothing_on_disk_changes(home: Home) -> None:
    key = home.operator.public_key
    store = AcceptedFile(home.folder / "alpha")
    store.save(Accepted(key, key, home.signed(epoch=4)))
    before = store.path.read_bytes()
    _, _, found = home.doctor("alpha")
    assert found["roster"][0]["what"].startswith("the roster of home, epoch 4")
    assert "the file, with epoch 1, may stay" in found["roster"][1]["what"]
    home.sign(epoch=6)
    _, _, found = home.doctor("alpha")
    assert found["roster"][0]["what"].startswith("the roster of home, epoch 6")
    assert store.path.read_bytes() == before


def test_a_configuration_that_cannot_be_read_is_a_finding(home: Home) -> None:
    (home.folder / "alpha.toml").write_text('[cluster]\nnam = "alpha"\n')
    code, _, found = home.doctor("alpha")
    assert code == 1
    assert found["config"][0]["mend"] == "did you mean name?"
    assert found["python"][0]["level"] == "ok"


@pytest.mark.long
def test_a_policy_and_a_model_that_cannot_be_read_are_findings(home: Home) -> None:
    text = (home.folder / "beta.toml").read_text().replace("[serve]", 'policy = "policy.toml"\n[serve]')
    (home.folder / "beta.toml").write_text(text + '[model]\npath = "nowhere"\n')
    (home.folder / "policy.toml").write_text("[placement]\n")
    code, _, found = home.doctor("beta")
    assert code == 1
    assert found["policy"][0]["level"] == "fail"
    assert "no model at" in found["model"][0]["what"]
