"""Members that compute other bits than the head are used, and everybody is told which they are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from cluster.recovery.test_recovery import ANSWER, ask, scene
from convoy.cluster import offer
from convoy.engine.outputs import Output, TokenOutput
from convoy.engine.requests.request import GenerationRequest
from convoy.model.sampling.params import SamplingParams
from support.cluster import MEMBER

LONG_TEXT = GenerationRequest(tuple(range(5, 25)), SamplingParams(temperature=0.0), 120, ignore_eos=True)


@pytest.mark.parametrize(("others", "named"), [("b" * 64, ["beta"]), ("a" * 64, [])])
def test_the_status_names_who_computes_other_bits(
    others: str, named: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    digests: Iterator[str] = iter([others, "a" * 64])  # the peer's, then the head's
    monkeypatch.setattr(offer, "bits_digest", lambda: next(digests))
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve()
        assert cluster.status().other_bits == named
        assert ("beta computes other bits than alpha" in caplog.text) == bool(named)
        assert ask(cluster) == ANSWER


def test_members_of_one_machine_agree() -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve()
        assert cluster.status().other_bits == []
        assert all(len(hello.bits) == 64 for hello in cluster.head.hellos().values())


@pytest.mark.parametrize(("kernel", "shaken"), [("plain-f32", True), ("exact-f32", False)])
def test_texts_that_go_on_without_the_same_bits_are_watched(
    kernel: str, shaken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with scene("beta") as s:
        s.join("beta")
        cluster = s.serve(member=replace(MEMBER, kernel=kernel))
        tokens: list[int] = []
        ended = threading.Event()

        def take(output: Output) -> None:
            if isinstance(output, TokenOutput):
                tokens.append(output.token_id)
                if len(tokens) == 5:
                    threading.Thread(target=s.peers["beta"].stop).start()
            else:
                ended.set()

        cluster.engine.submit(LONG_TEXT, take)
        assert ended.wait(60)
        assert len(tokens) == LONG_TEXT.max_tokens
        assert cluster.status().recoveries == 1
        assert ("1 running texts continue on stages that are not bit-exact" in caplog.text) == shaken
        assert cluster.status().near_ties >= 0
