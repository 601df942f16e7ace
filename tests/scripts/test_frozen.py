from __future__ import annotations

from pathlib import Path

import pytest

import frozen
from frozen_probe import Side, wire
from frozen_scene import scraped, shape

ROOT = Path(__file__).resolve().parents[2]


def test_equal_facts_have_no_difference_and_any_other_has_one() -> None:
    facts = {"a": [1, {"b": 2}], "c": "text"}
    assert frozen.differences(facts, dict(facts)) == []
    assert frozen.differences(facts, {"a": [1, {"b": 3}], "c": "text"}) == ["a: [1].b 2 became 3"]
    assert frozen.differences(facts, {"a": facts["a"]}) == ["only in the frozen tree: c"]
    assert frozen.differences({}, {"d": 1}) == ["only in the present tree: d"]
    assert frozen.differences({}, {"d": 1, "e": 2}, {"d": "why"}) == ["only in the present tree: e"]


def test_a_file_of_vectors_may_come_and_not_go() -> None:
    assert frozen.differences({}, {"vectors new.json": "x"}) == []
    assert frozen.differences({"vectors old.json": "x"}, {}) != []


def test_words_that_change_on_purpose_are_whole_words() -> None:
    assert frozen.renamed({"Plan generation": "generations"}, {"generation": "plan_id"}) == {
        "Plan plan_id": "generations"
    }


def test_a_probe_that_failed_is_a_difference(capsys: pytest.CaptureFixture[str]) -> None:
    failed = {"wire": {"the probe failed": "LookupError"}}
    assert not frozen.report((failed, failed), ["wire"], {})
    assert not frozen.report(({}, {}), ["wire"], {})
    assert frozen.report(({"wire": {"a": 1}}, {"wire": {"a": 1}}), ["wire"], {})
    assert "LookupError" in capsys.readouterr().out


def test_a_definition_is_found_by_its_name_wherever_it_lies() -> None:
    side = Side(ROOT, {})
    assert side.locate("MESSAGE_TYPES") is not None
    with pytest.raises(LookupError, match=r"map it in frozen_names\.toml"):
        side.locate("NothingOfThatName")
    mapped = Side(
        ROOT,
        {
            "Nothing": "convoy.wire.frame:cluster_tag",
            "wire:Hello": "convoy.wire.fleet.messages:ProviderHello",
        },
    )
    assert mapped.locate("Nothing").__name__ == "cluster_tag"
    assert mapped.locate("Hello", "wire").__module__ == "convoy.wire.fleet.messages"


def test_the_facts_of_the_wire_are_the_same_each_time_and_hold_tags_limits_and_labels() -> None:
    facts = wire(Side(ROOT, {}))
    assert facts == wire(Side(ROOT, {}))
    assert facts["FromProvider Heartbeat: form"][0] == "Heartbeat"
    assert facts["MAX_PAYLOAD_BYTES STEP"] == 64 * 1024 * 1024
    assert facts["bytes literal b'convoy provider proof v1'"] is True
    assert "link 0x20: bytes, all" in facts


def test_metrics_are_named_with_types_labels_and_buckets() -> None:
    page = '# TYPE a histogram\na_bucket{le="1.0",member="x"} 0\na_bucket{le="+Inf",member="x"} 1\n'
    assert scraped(page, "head")["head a"] == [
        *("histogram", ""),
        {"a_bucket": {"le": ["+Inf", "1.0"], "member": ["..."]}},
    ]


def test_what_differs_each_time_is_masked_and_prose_too() -> None:
    body = {"id": "chat-1", "created": 3, "usage": {"tokens": 5}, "reason": "some words", "text": "a b"}
    masked = {"id": "text", "created": "number", "usage": {"tokens": 5}, "reason": "text", "text": "a b"}
    assert shape(body, values=True) == masked
    assert shape({"rates": [1.5, 2.5]}, values=False) == {"rates": ["number"]}
