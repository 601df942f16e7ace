"""Under a kernel where guesses might change a text there are none, unless asked for; the status says so."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from cluster.recovery.test_recovery import ANSWER, ask, scene
from support.cluster import MEMBER


@pytest.mark.parametrize(
    ("kernel", "asked", "num_guesses"),
    [("auto", False, 8), ("plain-f32", False, 0), ("plain-f32", True, 8)],
)
def test_a_text_is_guessed_ahead_where_that_changes_nothing_or_was_asked_for(
    kernel: str, asked: bool, num_guesses: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    member = replace(MEMBER, kernel=kernel)
    with scene() as s:
        cluster = s.serve(member=member, speculate=8, guess_inexact=asked)
        assert cluster.status().guesses == num_guesses
        assert ask(cluster) == ANSWER
        if num_guesses == 0:
            assert cluster.status().drafted_tokens == 0
        assert ("no token is guessed ahead" in caplog.text) == (num_guesses == 0)
