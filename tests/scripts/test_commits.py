"""The rules of a commit's message."""

from __future__ import annotations

import pytest

import commits

WHY = "\n\nThe queue grew without bound.\n"


@pytest.mark.parametrize(
    "message", ["engine: bound the queue" + WHY, "api, docs: " + "x" * 61 + WHY, ".ci/run: time it" + WHY]
)
def test_a_short_subject_of_one_topic_and_a_reason_are_a_message(message: str) -> None:
    assert commits.faults_of(message) == []


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("engine: " + "x" * 65 + WHY, "73 characters, and 72 is the limit"),
        ("Bound the queue" + WHY, "does not begin with its room"),
        ("engine: bound the queue; name it" + WHY, "joins topics"),
        ("engine: bound the queue\n", "no body says why"),
        ("engine: bound the queue\n\n \n", "no body says why"),
        ("engine: bound the queue\nIt grew.", "no empty line"),
    ],
)
def test_a_message_that_breaks_one_rule_has_one_fault(message: str, fault: str) -> None:
    (found,) = commits.faults_of(message)
    assert fault in found
