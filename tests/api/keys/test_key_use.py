"""Limits of a key: rates, requests at once, and tokens in all, by a clock that the test turns."""

from __future__ import annotations

import pytest

from convoy.api.keys.key_use import KeyLimits, KeyUse
from convoy.api.refusals import NoBalance, RateLimited
from convoy.errors import RequestError


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def use_of(clock: Clock | None = None, **limits: int) -> KeyUse:
    return KeyUse(KeyLimits(**limits), clock=clock or Clock())


def answer(use: KeyUse, prompt: int, completion: int) -> None:
    with use.begin() as request:
        request.hold(prompt, prompt + completion)
        request.used(prompt, 0, completion)


def test_without_limits_everything_is_admitted_and_counted() -> None:
    use = use_of()
    for _ in range(3):
        answer(use, 10, 5)
    assert (use.requests, use.prompt_tokens, use.completion_tokens, use.running) == (3, 30, 15, 0)


def test_requests_per_minute_are_counted_over_the_last_sixty_seconds() -> None:
    clock = Clock()
    use = use_of(clock, requests_per_minute=2)
    answer(use, 1, 1)
    clock.now_s += 20
    answer(use, 1, 1)
    with pytest.raises(RateLimited, match="used 2 requests in the last minute, and it may use 2") as caught:
        use.begin()
    assert caught.value.retry_after_s == 40
    clock.now_s += 39
    with pytest.raises(RateLimited):
        use.begin()
    clock.now_s += 1
    answer(use, 1, 1)
    assert use.refusals == {"requests_per_minute": 2}
    assert use.requests == 3


def test_tokens_per_minute_count_prompt_and_completion() -> None:
    clock = Clock()
    use = use_of(clock, tokens_per_minute=100)
    answer(use, 60, 30)
    with use.begin() as request, pytest.raises(RateLimited, match="used 90 tokens"):
        request.hold(11, 20)
    answer(use, 10, 50)  # what it answers is known at the end alone
    with pytest.raises(RateLimited, match="used 150 tokens"):
        use.begin()
    clock.now_s += 60
    answer(use, 1, 1)


def test_prompts_of_running_requests_count_before_they_end() -> None:
    use = use_of(tokens_per_minute=100)
    with use.begin() as first:
        first.hold(60, 70)
        with use.begin() as second, pytest.raises(RateLimited):
            second.hold(60, 70)


def test_a_prompt_over_the_whole_minute_is_no_matter_of_waiting() -> None:
    use = use_of(tokens_per_minute=100)
    with (
        use.begin() as request,
        pytest.raises(RequestError, match="has 101 tokens, and this key may use 100"),
    ):
        request.hold(101, 102)


def test_concurrent_requests_free_their_place_also_when_they_fail() -> None:
    use = use_of(concurrent_requests=1)
    with use.begin(), pytest.raises(RateLimited, match="1 requests of this key run, and it may have 1"):
        use.begin()
    with pytest.raises(ZeroDivisionError), use.begin():
        raise ZeroDivisionError
    answer(use, 1, 1)


def test_a_spend_limit_is_never_passed() -> None:
    use = use_of(total_tokens=100)
    with use.begin() as first:
        first.hold(10, 60)
        with (
            use.begin() as second,
            pytest.raises(NoBalance, match="may use 50 tokens, and 40 of 100 are left"),
        ):
            second.hold(10, 50)
        first.used(10, 0, 20)
    answer(use, 10, 60)
    assert use.total_tokens == 100
    with pytest.raises(NoBalance, match="all of the 100 tokens"):
        use.begin()


def test_a_request_that_never_ran_spends_nothing() -> None:
    use = use_of(total_tokens=100)
    with use.begin() as request:
        request.hold(10, 100)
    answer(use, 10, 90)
