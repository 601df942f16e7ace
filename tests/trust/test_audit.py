"""Verify audit logs: entries hold, changes are found, and no action happens without its entry."""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import hashlib
import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import AuditError
from convoy.trust import audit
from convoy.trust.audit import (
    FIRST_PREVIOUS,
    MAX_ENTRY_BYTES,
    TORN,
    AuditLog,
    Entry,
    read_entries,
    verify_log,
)

KEY = OperatorKey.generate()
NOW = datetime.datetime(2026, 11, 22, 12, 30, tzinfo=datetime.UTC)


def log_in(folder: Path, key: OperatorKey = KEY) -> AuditLog:
    return AuditLog(folder / "keys" / "audit.jsonl", key, "operator", now=lambda: NOW)


def written(folder: Path, num_entries: int = 4) -> tuple[Path, list[Entry]]:
    log = log_in(folder)
    entries = [log.append("sign roster", {"epoch": number}) for number in range(num_entries)]
    return log.path, entries


def entries_of(path: Path) -> list[Entry]:
    return [entry for entry in read_entries(path) if isinstance(entry, Entry)]


def test_entries_say_what_was_done_from_where_under_which_key_and_in_which_order(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    log.append("sign roster", {"cluster": "home", "epoch": 2, "members": ["alpha", "b\u00eata"]})
    log.append("approve provider", {"name": "p"}, actor="administrator key abcd", origin="127.0.0.1")
    first, second = entries_of(log.path)
    assert first.fields["previous"] == FIRST_PREVIOUS
    assert second.fields["previous"] == first.hash
    assert [entry.number for entry in (first, second)] == [1, 2]
    assert first.fields["time"] == "2026-11-22T12:30:00.000000Z"
    assert first.fields["actor"] == "operator"
    assert first.fields["from"].startswith("user ")
    assert first.fields["key"] == KEY.public_key.hex()
    assert first.fields["subject"]["members"] == ["alpha", "b\u00eata"]
    assert (second.fields["actor"], second.fields["from"]) == ("administrator key abcd", "127.0.0.1")
    found = verify_log(log.path, expected=second.hash, key=KEY.public_key.hex())
    assert (found.num_entries, found.head, found.num_after) == (2, second.hash, 0)
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700


def test_an_identity_signs_a_log_as_an_operator_does(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "keys/audit.jsonl", Identity.generate(), "member alpha")
    assert verify_log(log.path, expected=log.append("accept roster", {}).hash).num_after == 0


def changed(lines: list[bytes]) -> list[bytes]:
    return [lines[0], lines[1].replace(b'"epoch":1', b'"epoch":7'), *lines[2:]]


def resigned(lines: list[bytes]) -> list[bytes]:
    """Sign with another key, as an attacker without the right one would."""
    fields = json.loads(lines[1])
    thief = OperatorKey.generate()
    fields.pop("signature")
    fields["key"] = thief.public_key.hex()
    fields["signature"] = thief.sign(audit.bytes_to_sign(fields)).hex()
    return [lines[0], audit.canonical_entry(fields), *lines[2:]]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (changed, "entry 2: its signature does not hold"),
        (resigned, "entry 2 is of key"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "entry 2 has number 3"),
        (lambda lines: [lines[0], *lines[2:]], "entry 2 has number 3"),
        (lambda lines: lines[1:], "entry 1 has number 2"),
        (lambda lines: [lines[0], *lines], "entry 2 has number 1"),
        (lambda lines: [*lines[:2], b"{}", *lines[2:]], "line 3: it has not the fields"),
        (lambda lines: [*lines[:2], lines[2].replace(b",", b", ", 1), lines[3]], "not written as canonical"),
        (lambda lines: [*lines[:2], b" " * MAX_ENTRY_BYTES + b"{}", *lines[2:]], "line 3"),
    ],
    ids=[
        "changed",
        "resigned",
        "reordered",
        "removed",
        "first removed",
        "doubled",
        "added",
        "spaced",
        "long",
    ],
)
def test_a_log_that_was_tampered_with_is_named_with_the_entry(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], error: str
) -> None:
    path, _ = written(tmp_path)
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().splitlines())))
    with pytest.raises(AuditError, match=error):
        verify_log(path)


def test_a_cut_end_is_found_with_the_expected_hash_and_not_without(tmp_path: Path) -> None:
    path, entries = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    assert verify_log(path).num_entries == 2
    assert verify_log(path).num_after is None
    with pytest.raises(AuditError, match="its end was cut off") as caught:
        verify_log(path, expected=entries[3].hash)
    assert entries[1].hash in str(caught.value.hint)
    path.write_bytes(b"".join(lines))
    assert verify_log(path, expected=entries[1].hash).num_after == 2


def test_a_whole_other_chain_in_its_place_is_found_by_key_and_by_hash(tmp_path: Path) -> None:
    path, entries = written(tmp_path / "real", 2)
    other = log_in(tmp_path / "other", OperatorKey.generate())
    other.append("sign roster", {"epoch": 0})
    with pytest.raises(AuditError, match="entry 1 is of key"):
        verify_log(other.path, key=KEY.public_key.hex())
    with pytest.raises(AuditError, match="or it is another log"):
        verify_log(other.path, expected=entries[-1].hash)
    assert verify_log(path, key=KEY.public_key.hex()).num_entries == 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_changed_bit_is_found(tmp_path_factory: pytest.TempPathFactory, place: float, bit: int) -> None:
    path, entries = written(tmp_path_factory.mktemp("log"), 2)
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(AuditError):
        verify_log(path, expected=entries[-1].hash)


def test_a_torn_last_line_is_named_and_the_next_entry_takes_its_place(tmp_path: Path) -> None:
    path, entries = written(tmp_path, 3)
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in (last + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert verify_log(path).num_torn_bytes == cut - last
        log_in(tmp_path).append("sign roster", {"epoch": 9})
        *before, torn, after = entries_of(path)
        assert [entry.hash for entry in before] == [entry.hash for entry in entries[:2]]
        assert torn.fields["action"] == TORN
        assert torn.fields["subject"]["num_bytes"] == cut - last
        assert after.fields["subject"] == {"epoch": 9}
        assert verify_log(path, expected=after.hash).num_torn_bytes == 0


def test_a_first_line_that_is_torn_is_replaced_too(tmp_path: Path) -> None:
    path, _ = written(tmp_path, 1)
    path.write_bytes(path.read_bytes()[:20])
    log_in(tmp_path).append("sign roster", {})
    assert [entry.fields["action"] for entry in entries_of(path)] == [TORN, "sign roster"]


@pytest.mark.parametrize("short", [True, False], ids=["half written", "refused"])
def test_a_full_disk_refuses_the_action_and_leaves_the_log_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    path, entries = written(tmp_path)
    real, done = os.pwrite, []

    def full(descriptor: int, data: bytes, at: int) -> int:
        if not data:
            return 0
        if short:
            return real(descriptor, data[:40], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with (
        pytest.raises(AuditError, match="cannot write the audit log") as caught,
        log_in(tmp_path).doing("x", {}),
    ):
        done.append(1)
    assert not done
    assert "nothing was done" in str(caught.value.hint)
    monkeypatch.undo()
    assert verify_log(path, expected=entries[-1].hash).num_after == 0
    assert verify_log(path).num_torn_bytes == 0


def test_an_action_that_fails_is_followed_by_an_entry_that_says_so(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    with pytest.raises(RuntimeError), log.doing("sign roster", {"epoch": 3}):
        raise RuntimeError("secret words")
    begun, failed = entries_of(log.path)
    assert failed.fields["action"] == "failed: sign roster"
    assert failed.fields["subject"] == {"sequence": begun.number, "error": "RuntimeError"}
    assert b"secret" not in log.path.read_bytes()


def test_appends_at_once_make_one_chain(tmp_path: Path) -> None:
    def work(number: int) -> None:
        for index in range(10):
            log_in(tmp_path).append("x", {"thread": number, "index": index})

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verify_log(tmp_path / "keys/audit.jsonl").num_entries == 40


def test_a_lock_that_is_never_given_back_is_a_named_error(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waits = AuditLog(path, KEY, "operator", lock_timeout_s=0.05)
        with pytest.raises(AuditError, match="another process has held its lock"):
            waits.append("x", {})


def test_a_chain_that_is_broken_at_its_end_takes_no_entry(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.write_bytes(path.read_bytes()[:-3] + b"\n")
    with pytest.raises(AuditError, match="its last entry does not hold"):
        log_in(tmp_path).append("x", {})


def test_the_log_of_another_key_takes_no_entry(tmp_path: Path) -> None:
    written(tmp_path)
    with pytest.raises(AuditError, match="is the log of key"):
        log_in(tmp_path, OperatorKey.generate()).append("x", {})


def test_a_log_that_others_can_read_or_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path, _ = written(tmp_path)
    path.chmod(0o644)
    with pytest.raises(AuditError, match="mode 0644, expected 0600"):
        log_in(tmp_path).append("x", {})
    path.chmod(0o600)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuditError, match="cannot write"):
        log_in(tmp_path).append("x", {})


def test_an_entry_has_a_bounded_size(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="is the limit"):
        log_in(tmp_path).append("x", {"long": "y" * MAX_ENTRY_BYTES})
    assert entries_of(tmp_path / "keys/audit.jsonl") == []


def test_a_log_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="cannot read"):
        verify_log(tmp_path / "audit.jsonl")


@given(garbage=st.binary(max_size=300))
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_is_an_audit_error_or_a_torn_line(
    tmp_path_factory: pytest.TempPathFactory, garbage: bytes
) -> None:
    path = tmp_path_factory.mktemp("log") / "audit.jsonl"
    path.write_bytes(garbage)
    with contextlib.suppress(AuditError):
        assert verify_log(path).num_entries == 0


def test_an_independent_computation_agrees(tmp_path: Path) -> None:
    # From docs/protocol.md alone: JSON, SHA-256 and Ed25519, nothing of ours.
    path, _ = written(tmp_path, 3)
    previous = "0" * 64
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        entry = json.loads(line)
        assert (entry["sequence"], entry["previous"]) == (number, previous)
        signature = bytes.fromhex(entry.pop("signature"))
        text = json.dumps(entry, sort_keys=True, separators=(",", ":")).encode()
        label = b"convoy audit v1"
        said = b"".join(len(part).to_bytes(4, "big") + part for part in (label, text))
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(entry["key"])).verify(signature, said)
        previous = hashlib.sha256(line).hexdigest()
    assert verify_log(path).head == previous
