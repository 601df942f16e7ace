from __future__ import annotations

from convoy.fleet.answer import is_of_engine


def test_what_an_engine_refuses_to_whoever_asks_is_no_answer() -> None:
    assert all(is_of_engine(status) for status in (401, 403, 404, 408, 429, 500, 503, 599))
    assert not any(is_of_engine(status) for status in (200, 400, 413, 415, 422))
