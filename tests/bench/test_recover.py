"""What a bench of losses makes of the times it saw, on a cluster that is made up."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from convoy.bench.recover import (
    LOSSES,
    Loss,
    RecoverOptions,
    RecoverRow,
    prompt_of,
    recover_ratios,
    try_loss,
    undisturbed,
)
from convoy.bench.report.clock import Deadline
from convoy.bench.watched import Watched, seconds_to_next, seconds_to_pace
from convoy.errors import ConvoyError, PeerError, StageLost

OPTIONS = RecoverOptions(max_tokens=6, before_tokens=2, prompt_tokens=4)
BODIES = OPTIONS.bodies("made up", 97, long=False)
KILL = LOSSES[0]


class MadeUp:
    """Answer with six pieces; wait after two until a peer is gone, and then do as ``after`` says."""

    def __init__(self, after: str = "go on") -> None:
        self.peers = ["beta", "gamma"]
        self.after = after
        self.gone = threading.Event()
        self.leaked = 0

    def ask(self, body: Mapping[str, Any]) -> Iterator[str]:
        name = "g" if body["temperature"] == 0 else "s"
        yield from (f"{name}1 ", f"{name}2 ")
        assert self.gone.wait(30)
        if self.after == "lose":
            raise StageLost("it is over")
        yield from (f"{name}{count} " for count in (3, 4, 5))
        yield "other" if self.after == "differ" and name == "s" else f"{name}6"

    def status(self) -> Mapping[str, Any]:
        stages = ["alpha"] if self.gone.is_set() else ["alpha", *self.peers]
        return {"stages": stages, "steps": 7, "num_blocks": 9, "free_blocks": 9 - self.leaked}

    def kill(self, name: str) -> None:
        assert name in self.peers
        self.gone.set()

    start = stop = resume = cut = mend = slow = kill


def texts() -> dict[str, str]:
    arena = MadeUp()
    arena.gone.set()
    return undisturbed(arena, BODIES, Deadline(30))


def row_of(after: str, loss: Loss = KILL) -> RecoverRow:
    arena = MadeUp(after)
    return try_loss(arena, loss, BODIES, texts(), options=OPTIONS, deadline=Deadline(30))


def test_the_same_text_after_a_loss_is_identical() -> None:
    row = row_of("go on")
    assert (row.loss, row.survived, row.identical, row.error) == ("kill -9", True, True, None)
    assert (row.members, row.members_after, row.blocks_leaked) == (3, 1, 0)
    assert row.seconds_to_next_token is not None
    assert 0 <= row.seconds_to_next_token < 30


def test_another_text_in_one_of_two_streams_is_not_identical() -> None:
    row = row_of("differ")
    assert (row.survived, row.identical) == (True, False)


def test_a_stream_that_ends_in_an_error_is_not_survived_and_says_why() -> None:
    row = row_of("lose")
    assert (row.survived, row.identical, row.error) == (False, False, "it is over")
    assert row.seconds_to_next_token is None


def test_a_stream_that_ends_while_its_prompt_is_read_is_told_and_not_waited_for() -> None:
    arena = MadeUp("lose")
    arena.gone.set()
    loss = LOSSES[6]
    assert loss.prefill
    row = try_loss(arena, loss, BODIES, texts(), options=OPTIONS, deadline=Deadline(30))
    assert (row.survived, row.error) == (False, "it is over")


def test_streams_that_are_over_before_the_loss_are_an_error_and_no_figure() -> None:
    arena = MadeUp()
    arena.gone.set()
    with pytest.raises(ConvoyError, match="over before the loss"):
        try_loss(
            arena,
            KILL,
            BODIES,
            texts(),
            options=RecoverOptions(max_tokens=6, before_tokens=7, prompt_tokens=4),
            deadline=Deadline(30),
        )


def test_an_undisturbed_run_that_fails_ends_the_bench() -> None:
    arena = MadeUp("lose")
    arena.gone.set()
    with pytest.raises(PeerError, match="it is over"):
        undisturbed(arena, BODIES, Deadline(30))


def test_the_next_token_is_the_one_after_the_longest_pause() -> None:
    # two tokens were on their way when the member was lost at 1.0
    times_s = [0.8, 0.9, 1.01, 1.02, 3.5, 3.6, 3.9]
    assert seconds_to_next(times_s, 1.0) == 2.5
    assert seconds_to_next(times_s, 3.55) == pytest.approx(0.35)
    assert seconds_to_next(times_s, 1.0, until_s=1.0) == pytest.approx(0.01)
    assert seconds_to_next(times_s, 4.0) is None
    assert seconds_to_next([5.0, 5.1], 1.0) == 4.0


def test_a_stream_that_crawls_is_told_by_its_first_pause_and_by_when_it_runs_again() -> None:
    crawling = [0.9, 1.0, 3.0, 5.05, 7.0, 7.1, 7.2]
    assert seconds_to_next(crawling, 1.0) == 2.0
    assert seconds_to_pace(crawling, 1.0, 0.5) == 6.0
    assert seconds_to_pace([0.9, 1.0, 1.1], 1.0, 0.5) == 0.0


def test_a_loss_during_prefill_counts_from_the_loss() -> None:
    assert seconds_to_next([4.0, 4.5, 4.9], 3.0) == 1.0


def test_all_eight_losses_are_there_and_have_names_of_their_own() -> None:
    assert len({loss.name for loss in LOSSES}) == 8


def test_prompts_begin_differently_and_are_the_same_in_every_run() -> None:
    assert prompt_of(5, 97, 1) == prompt_of(5, 97, 1)
    assert prompt_of(5, 97, 1)[0] != prompt_of(5, 97, 2)[0]
    assert max(prompt_of(500, 97, 3)) < 97


def test_ratios_count_what_was_survived_with_identical_text() -> None:
    good = RecoverRow("one", 0.5, 0.5, True, True, 3, 2, 0.01, 0, None)
    bad = RecoverRow("two", None, 0.0, False, True, 3, 2, 0.01, 0, None)
    assert recover_ratios([good, bad]) == {
        "survived_and_identical": 0.5,
        "slowest_seconds_to_next_token": 0.5,
    }


def test_watching_an_answer_tells_an_end_from_a_stop() -> None:
    watched = Watched(lambda: iter(["a", "b"]))
    assert watched.wait(30)
    assert watched.wait_for(2, 0)
    assert not watched.wait_for(3, 0)
    assert watched.text == "ab"
    assert watched.times_s == sorted(watched.times_s)
