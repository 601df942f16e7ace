"""Which statuses a page is sent: every change at once, and measurements alone at a slower pace."""

from __future__ import annotations

from typing import Any

import msgspec

from cli.test_top import STATUS
from convoy.api.page.status_stream import StatusChanges
from convoy.cluster.status import AbsentStatus, ClusterStatus


def measured(number: int, **fields: Any) -> ClusterStatus:
    """Return the status with measurements that no other number has."""
    stages = [
        msgspec.structs.replace(stage, round_trip_s=float(number), sealed_bytes_sent=number)
        for stage in STATUS.stages
    ]
    return msgspec.structs.replace(STATUS, stages=stages, ring_s=float(number), **fields)


def test_measurements_alone_are_sent_once_in_four_statuses() -> None:
    changes = StatusChanges()
    taken = [changes.take(measured(number)) for number in range(9)]
    assert taken == [True, False, False, False, True, False, False, False, True]


def test_only_a_status_that_is_sent_in_any_case_needs_new_measurements() -> None:
    changes, wanted = StatusChanges(), []
    for number in range(9):
        wanted.append(changes.wants_measurements)
        changes.take(measured(number))
    assert wanted == [False, False, False, False, True, False, False, False, True]


def test_a_change_is_sent_at_once() -> None:
    changes = StatusChanges()
    taken = [
        changes.take(measured(1)),
        changes.take(measured(2)),
        changes.take(measured(3, absent=[AbsentStatus("beta")])),
        changes.take(measured(4, absent=[AbsentStatus("beta")])),
        changes.take(measured(5, absent=[AbsentStatus("beta")], generated_tokens=51)),
        changes.take(measured(6)),
    ]
    assert taken == [True, False, True, False, True, True]


def test_a_status_of_another_kind_is_compared_as_a_whole() -> None:
    changes = StatusChanges()
    assert [changes.take({"ready": ready}) for ready in (True, True, False)] == [True, False, True]


def test_a_status_of_another_process_is_read_first() -> None:
    changes = StatusChanges()
    raw = [msgspec.Raw(msgspec.json.encode(measured(number))) for number in range(3)]
    assert [changes.take(one) for one in (*raw, msgspec.Raw(b'{"ready":1}'))] == [True, False, False, True]
