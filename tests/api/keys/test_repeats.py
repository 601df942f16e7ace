"""A request that does not fit the context is not worked on again and again."""

from __future__ import annotations

import pytest

from convoy.api.keys.repeats import CONTEXT_ERROR, Repeats
from convoy.api.refusals import RateLimited
from convoy.errors import RequestError

TOO_LONG = RequestError("the prompt is too long", code=CONTEXT_ERROR)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def fail(repeats: Repeats, caller: str = "ann", kind: str = "chat", body: bytes = b"long") -> None:
    mark = repeats.check(caller, kind, body)
    with pytest.raises(RequestError), repeats.noting(mark):
        raise TOO_LONG


def test_the_sixth_identical_request_in_a_minute_is_refused() -> None:
    clock = Clock()
    repeats = Repeats(clock=clock)
    for _ in range(5):
        fail(repeats)
        clock.now_s += 5
    with pytest.raises(RateLimited, match="failed 5 times in a minute") as caught:
        fail(repeats)
    assert caught.value.retry_after_s == 35
    for other in ({"caller": "bob"}, {"kind": "completion"}, {"body": b"longer"}):
        fail(repeats, **other)
    clock.now_s += 35
    fail(repeats)
    with pytest.raises(RateLimited):
        fail(repeats)


def test_other_errors_may_be_repeated() -> None:
    repeats = Repeats(clock=Clock())
    for _ in range(20):
        with pytest.raises(RequestError), repeats.noting(repeats.check("ann", "chat", b"x")):
            raise RequestError("no", code="invalid_type")


def test_the_table_is_bounded() -> None:
    repeats = Repeats(max_requests=8, clock=Clock())
    for number in range(100):
        fail(repeats, body=str(number).encode())
    assert repeats.num_requests == 8
