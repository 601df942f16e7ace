"""`convoy bench spec` compares texts before it compares speeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from convoy.bench.report.clock import Deadline
from convoy.bench.spec import (
    FORMED,
    PLAIN,
    REPETITIVE,
    Contender,
    Said,
    SpecOptions,
    SpecRow,
    measure_spec,
    spec_ratios,
)
from convoy.engine.completion import Completion
from convoy.errors import ConvoyError
from convoy.model.checkpoints.source import ModelSource
from support.cluster import running_cluster

OPTIONS = SpecOptions(num_tokens=16, num_rounds=2)


@contextmanager
def contender(speculate: int) -> Iterator[Contender]:
    source = ModelSource.resolve("demo-mini")
    with running_cluster(source, 1, speculate=speculate, jump_forward=speculate > 0) as cluster:
        yield Contender(cluster.engine, cluster.tokenizer, speculate, 0.5, 1.5)


@pytest.fixture(scope="module")
def without() -> Iterator[Contender]:
    with contender(0) as found:
        yield found


@pytest.mark.long
def test_each_text_has_a_row_with_guesses_and_one_without(without: Contender) -> None:
    with contender(4) as guessing:
        rows = measure_spec([without, guessing], OPTIONS, said=Said(), deadline=Deadline(60))
    assert [(row.text, row.drawn, row.speculate) for row in rows] == [
        (text, drawn, speculate)
        for text, drawn in ((PLAIN, "greedy"), (PLAIN, "seeded"), (REPETITIVE, "greedy"), (FORMED, "seeded"))
        for speculate in (0, 4)
    ]
    assert all(row.identical and row.tokens_per_s > 0 for row in rows)
    assert (rows[4].tokens, rows[4].drafted) == (3 * 16, 0)
    assert rows[5].drafted >= rows[5].accepted > 0
    assert [row.tokens for row in rows[::2]] == [row.tokens for row in rows[1::2]]
    assert rows[6].drafted == 0 < rows[7].accepted, "much of a schema's text is forced"
    assert len(spec_ratios(rows)) == 4


def answer(*tokens: int) -> Completion:
    return Completion("", tokens, "length", prompt_tokens=3, time_to_first_token_s=0.1, total_s=0.2)


def test_another_text_than_without_guesses_fails_the_bench() -> None:
    said = Said()
    said.check(PLAIN, "greedy", [answer(1, 2), answer(3)])
    said.check(PLAIN, "greedy", [answer(1, 2), answer(3)])
    said.check(PLAIN, "seeded", [answer(1, 2), answer(4)])
    with pytest.raises(ConvoyError, match=r"the plain text \(greedy\) differs from the text without"):
        said.check(PLAIN, "greedy", [answer(1, 2), answer(4)])


def test_a_bench_of_guesses_ends_with_its_deadline(without: Contender) -> None:
    with pytest.raises(ConvoyError, match="longer than 0 s"):
        measure_spec([without], OPTIONS, said=Said(), deadline=Deadline(0))


def row(text: str, delay_ms: float, speculate: int, rate: float) -> SpecRow:
    return SpecRow(text, "greedy", delay_ms, speculate, 100, rate, 0, 0, True, 0.0)


def test_ratios_are_of_the_same_text_over_the_same_wire() -> None:
    rows = [row(PLAIN, 2, 0, 50), row(REPETITIVE, 2, 0, 40), row(PLAIN, 2, 8, 51), row(REPETITIVE, 2, 8, 120)]
    rows += [row(PLAIN, 0.2, 0, 80)]
    assert spec_ratios(rows) == {"plain_greedy_2_ms": 1.02, "repetitive_greedy_2_ms": 3.0}
