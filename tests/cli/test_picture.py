"""What the picture of a cluster says beside its stages."""

from __future__ import annotations

from typing import Any

from convoy.cli.picture import guesses_text, recoveries_text, standbys_text
from convoy.cluster.status import ClusterStatus, StandbyStatus


def cluster(**fields: Any) -> ClusterStatus:
    numbers = ("generation", "running", "waiting", "num_blocks", "free_blocks", "steps", "prompt_tokens")
    base: dict[str, Any] = dict.fromkeys(numbers, 0) | dict.fromkeys(
        ("model", "reason", "route", "kernel"), ""
    )
    return ClusterStatus(**base, ready=True, stages=[], generated_tokens=0, ring_s=None, **fields)


def test_a_standby_is_named_with_what_it_has_loaded() -> None:
    text = standbys_text([StandbyStatus("gamma", "6-11"), StandbyStatus("delta")])
    assert text == "gamma (has loaded layers 6-11), delta (nothing loaded yet)"


def test_guesses_are_off_or_counted() -> None:
    assert guesses_text(cluster()) == "off"
    told = guesses_text(cluster(guesses=8, drafted_tokens=40, accepted_tokens=30))
    assert told == "40 run, 30 of them right; at most 8 at once"


def test_recoveries_after_which_a_text_may_differ_say_where() -> None:
    assert recoveries_text(cluster(recoveries=2)) == "2"
    told = recoveries_text(cluster(recoveries=2, near_ties=3))
    assert told == "2; 3 tokens since then had a rival (near ties)"
