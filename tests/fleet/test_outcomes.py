from __future__ import annotations

from convoy.fleet.outcomes import LabelSums, word_of


def test_labels_never_grow_beyond_a_limit() -> None:
    sums = LabelSums("model", "outcome", max_series=3)
    for number in range(50):
        sums.add(f"model-{number}", "complete")
    samples = {sample.labels["model"]: sample.value for sample in sums.family("a", "b").samples}
    assert samples == {"model-0": 1, "model-1": 1, "model-2": 1, "(other)": 47}


def test_outcomes_are_words_of_one_form() -> None:
    said = ("complete", "client gone", "QueueFull", "NoBalance", "lease not used", "")
    assert [word_of(one) for one in said] == [
        *("complete", "client_gone", "queue_full", "no_balance", "lease_not_used", "unknown")
    ]
