"""Members that compute other bits than the head are used, and everybody is told which they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.test_recovery import ANSWER, ask, scene
from convoy.cluster import offer


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
