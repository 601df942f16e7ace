"""What administrators do stands in the coordinator's audit log before it is done, and no secret does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from convoy.crypto.identity import Identity
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.trust.audit import AuditLog, Entry, read_entries, verify_log
from support.fleet import FleetUnderTest

PROVIDER = "ab" * 32


@pytest.fixture
def audit(tmp_path: Path) -> AuditLog:
    return AuditLog(tmp_path / "keys" / "audit.jsonl", Identity.generate(), "coordinator")


@pytest.fixture
def admin(audit: AuditLog, tmp_path: Path) -> Iterator[httpx.Client]:
    fleet = FleetUnderTest(tmp_path, CoordinatorOptions(audit=audit))
    with fleet.admin() as client:
        yield client
    fleet.close()


def entries(audit: AuditLog) -> list[Entry]:
    return [entry for entry in read_entries(audit.path) if isinstance(entry, Entry)]


def test_every_action_of_an_administrator_is_in_the_log(admin: httpx.Client, audit: AuditLog) -> None:
    made = []
    for path, body in (
        ("/accounts", {"name": "dora", "credit_micro": 5}),
        ("/credits", {"account": "dora", "amount_micro": 7}),
        ("/keys", {"scope": "consumer", "account": "dora", "label": "laptop"}),
        ("/keys/revoke", {"account": "dora", "hint": "none"}),
        ("/providers", {"identity": PROVIDER, "name": "gpu"}),
        ("/providers/revoke", {"name": "gpu"}),
    ):
        answer = admin.post(path, json=body)
        assert answer.status_code in {200, 201}, answer.text
        made.append(answer.json())
    found = entries(audit)
    assert [entry.fields["action"] for entry in found] == [
        "open account",
        "add credit",
        "add credit",
        "make API key",
        "revoke API key",
        "approve provider",
        "revoke provider",
    ]
    assert found[2].fields["subject"] == {"account": "dora", "amount_micro": 7}
    assert found[5].fields["subject"] == {"name": "gpu", "identity": PROVIDER}
    assert {entry.fields["from"] for entry in found} == {"127.0.0.1"}
    key = admin.headers["authorization"].removeprefix("Bearer ")
    assert {entry.fields["actor"] for entry in found} == {f"administrator key {key[7:11]}"}
    text = audit.path.read_text()
    assert key not in text
    assert made[2]["key"] not in text
    assert verify_log(audit.path).num_entries == 7


def test_the_entry_of_a_new_key_says_which_key_and_what_it_may_use(
    admin: httpx.Client, audit: AuditLog
) -> None:
    admin.post("/accounts", json={"name": "dora"})
    body = {"scope": "consumer", "account": "dora", "label": "laptop", "spend_limit_micro": 500}
    key = admin.post("/keys", json=body).json()["key"]
    made = entries(audit)[-1]
    assert made.fields["subject"] == {**body, "hint": key[7:11]}
    assert key[7:11] in [one["hint"] for one in admin.get("/keys").json() if one["label"] == "laptop"]
    assert key not in audit.path.read_text()


def test_an_action_that_is_refused_is_followed_by_an_entry_that_says_so(
    admin: httpx.Client, audit: AuditLog
) -> None:
    assert admin.post("/credits", json={"account": "nobody", "amount_micro": 7}).status_code == 400
    assert [entry.fields["action"] for entry in entries(audit)] == ["add credit", "failed: add credit"]


def test_nothing_is_done_that_cannot_be_written_down(admin: httpx.Client, audit: AuditLog) -> None:
    admin.post("/accounts", json={"name": "dora"})
    audit.path.chmod(0o644)
    answer = admin.post("/credits", json={"account": "dora", "amount_micro": 7})
    assert answer.status_code == 503
    assert "nothing was done" in json.dumps(answer.json())
    assert str(audit.path) not in answer.text
    assert {"name": "dora", "balance_micro": 0} in admin.get("/accounts").json()


def test_a_stranger_writes_nothing_into_the_log(admin: httpx.Client, audit: AuditLog) -> None:
    answer = admin.post("/accounts", json={"name": "x"}, headers={"authorization": "Bearer convoy-wrong"})
    assert answer.status_code == 401
    assert not audit.path.exists()
