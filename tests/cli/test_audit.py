"""`convoy audit` over what the operator's commands wrote, and what they refuse without a log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.transcript import run_here
from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import AuditError
from convoy.trust.audit import AuditLog
from convoy.trust.roster.accepted import AcceptedFile
from convoy.trust.roster.authority import open_membership
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster
from support.examined import derive_quickly

LOG = ".convoy/operator"


@pytest.fixture(autouse=True)
def quick_passphrases(monkeypatch: pytest.MonkeyPatch) -> None:
    derive_quickly(monkeypatch)


def ran(folder: Path, *arguments: str) -> str:
    done = run_here(list(arguments), folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(folder: Path, log: str = LOG) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = json.loads(ran(folder, "audit", "show", log, "--json"))
    return entries


@pytest.fixture
def signed(tmp_path: Path) -> Path:
    for name in ("alpha", "beta"):
        ran(tmp_path, "identity", "new", name, "--address", f"127.0.0.1:700{len(name)}")
    ran(tmp_path, "roster", "new", "home", "alpha.card.toml", "--head", "alpha")
    return tmp_path


def test_what_an_operator_signs_is_in_the_log_beside_the_key(signed: Path) -> None:
    ran(signed, "roster", "add", "beta.card.toml")
    ran(signed, "roster", "remove", "beta")
    ran(signed, "roster", "sign", "--new-operator", "new")
    entries = shown(signed)
    assert [entry["action"] for entry in entries] == [
        "make operator key",
        "sign roster",
        "sign roster",
        "sign roster",
        "hand over operator",
    ]
    assert entries[2]["subject"]["members"] == ["alpha", "beta"]
    assert entries[2]["subject"]["epoch"] == 2
    assert all(entry["from"].startswith("user ") for entry in entries)
    new = shown(signed, "new")
    assert [entry["action"] for entry in new] == ["make operator key", "sign roster"]
    assert entries[4]["subject"]["new"] == new[0]["key"]
    digest = json.loads(ran(signed, "roster", "show", "roster.toml", "--json"))["digest"]
    assert new[1]["subject"]["digest"] == digest


def test_verify_prints_a_head_that_finds_a_cut_end_later(signed: Path) -> None:
    done = run_here(["audit", "verify", LOG], signed)
    assert done.returncode == 0
    assert "cannot be told without --expect" in done.stderr
    ran(signed, "roster", "sign")
    found = json.loads(ran(signed, "audit", "verify", LOG, "--json"))
    file = signed / LOG / "audit.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    assert run_here(["audit", "verify", LOG], signed).returncode == 0
    done = run_here(["audit", "verify", LOG, "--expect", found["head"]], signed)
    assert done.returncode == 1
    assert "its end was cut off" in done.stderr
    file.write_bytes(whole)
    done = run_here(["audit", "verify", str(file), "--expect", found["head"], "--key", found["key"]], signed)
    assert done.returncode == 0
    assert "with 0 behind it" in done.stderr
    file.write_bytes(whole[:-9])
    assert "torn" in run_here(["audit", "verify", LOG], signed).stderr
    assert "torn" in run_here(["audit", "show", LOG], signed).stderr


@pytest.mark.parametrize("value", ["abc", "G" * 64])
def test_a_hash_that_is_none_is_a_usage_error(signed: Path, value: str) -> None:
    assert run_here(["audit", "verify", LOG, "--expect", value], signed).returncode == 2


def test_nothing_is_signed_that_cannot_be_written_down(signed: Path) -> None:
    before = (signed / "roster.toml").read_bytes()
    (signed / LOG / "audit.jsonl").chmod(0o644)
    done = run_here(["roster", "add", "beta.card.toml"], signed)
    assert done.returncode == 1
    assert "the audit log: file" in done.stderr
    assert "mode 0644, expected 0600" in done.stderr
    assert (signed / "roster.toml").read_bytes() == before


def test_a_passphrase_and_a_certificate_are_in_the_log_and_no_secret_is(signed: Path) -> None:
    (signed / "word").write_text("very secret\n")
    (signed / "word").chmod(0o600)
    ran(signed, "identity", "passphrase", "--new-passphrase-file", "word")
    ran(signed, "identity", "certify", "ab" * 32, "a provider", "--passphrase-file", "word")
    ran(signed, "identity", "passphrase", "--passphrase-file", "word", "--remove")
    actions = [entry["action"] for entry in shown(signed)]
    assert actions[-3:] == ["set passphrase", "certify provider", "remove passphrase"]
    assert "secret" not in (signed / LOG / "audit.jsonl").read_text()


def test_show_prints_a_table_and_no_control_characters(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "keys/audit.jsonl", OperatorKey.generate(), "operator")
    log.append("sign \x1b[31mroster", {"name": "\x1b]0;x\x07"}, origin="\x1b[2J")
    done = run_here(["audit", "show", "keys"], tmp_path)
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert "sequence" in done.stdout


def test_a_member_writes_down_which_rosters_it_accepted_and_from_where(tmp_path: Path) -> None:
    operator, identity = OperatorKey.generate(), Identity.generate()
    identity.save(tmp_path / "id")
    members = [member_of("alpha", identity, ("127.0.0.1", 7001), head=True)]

    def roster(epoch: int) -> bytes:
        return sign_roster(make_roster("home", members, epoch=epoch), operator)

    file = AcceptedFile(tmp_path / "id")
    opened = open_membership("alpha", identity, roster(1), operator_key=operator.public_key, file=file)
    second = roster(2)
    assert opened.membership.offer(second, "beta")
    assert not opened.membership.offer(second, "gamma")
    entries = shown(tmp_path, "id")
    assert [(entry["action"], entry["subject"]["epoch"], entry["from"]) for entry in entries] == [
        ("accept roster", 1, "the roster file, at the start"),
        ("accept roster", 2, "beta"),
    ]
    assert {entry["key"] for entry in entries} == {identity.public_key.hex()}
    assert entries[0]["actor"] == "member alpha"


def test_a_roster_counts_though_the_log_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operator, identity = OperatorKey.generate(), Identity.generate()
    identity.save(tmp_path / "id")
    members = [member_of("alpha", identity, ("127.0.0.1", 7001), head=True)]
    (tmp_path / "id/audit.jsonl").mkdir()
    signed = sign_roster(make_roster("home", members), operator)
    file = AcceptedFile(tmp_path / "id")
    open_membership("alpha", identity, signed, operator_key=operator.public_key, file=file)
    assert file.load() is not None
    assert "is not in the log: cannot write the audit log" in caplog.text


def test_an_unwritable_log_is_an_audit_error(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o700)
    (tmp_path / "keys/audit.jsonl").mkdir()
    with pytest.raises(AuditError, match="is a directory"):
        AuditLog(tmp_path / "keys/audit.jsonl", OperatorKey.generate(), "operator").append("x", {})
