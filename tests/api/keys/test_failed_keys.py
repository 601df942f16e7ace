"""Wrong keys are answered slowly, without holding more than a bounded number of answers back."""

from __future__ import annotations

import asyncio
import logging

import pytest

from convoy.api.keys.failed_keys import FailedKeys
from convoy.api.refusals import RateLimited, Unauthenticated, WrongKey

WRONG = WrongKey("the api key is not right")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def test_the_delay_of_an_address_grows_to_two_seconds_and_is_forgotten() -> None:
    clock = Clock()
    failed = FailedKeys(clock=clock, sleep=clock.sleep)

    async def run() -> None:
        for _ in range(8):
            assert await failed.refuse(WRONG, "192.0.2.1") is WRONG
        assert clock.slept == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
        await failed.refuse(WRONG, "192.0.2.2")
        clock.now_s += 61
        await failed.refuse(WRONG, "192.0.2.1")
        assert len(clock.slept) == 7

    asyncio.run(run())


def test_addresses_of_one_network_of_ipv6_count_as_one() -> None:
    clock = Clock()
    failed = FailedKeys(clock=clock, sleep=clock.sleep)

    async def run() -> None:
        for address in ("2001:db8::1", "2001:db8::2", "::ffff:192.0.2.1", "192.0.2.1"):
            await failed.refuse(WRONG, address)

    asyncio.run(run())
    assert clock.slept == [0.1, 0.1]


def test_no_key_at_all_is_no_guess() -> None:
    clock = Clock()
    failed = FailedKeys(clock=clock, sleep=clock.sleep)
    none = Unauthenticated("no api key was sent")

    async def run() -> None:
        for _ in range(5):
            assert await failed.refuse(none, "192.0.2.1") is none

    asyncio.run(run())
    assert clock.slept == []
    (family,) = failed.families()
    assert {one.labels["reason"]: one.value for one in family.samples} == {"none": 5, "wrong": 0}


def test_beyond_the_bounds_an_answer_goes_out_at_once() -> None:
    go = asyncio.Event()

    async def sleep(_: float) -> None:
        await go.wait()

    async def run() -> None:
        failed = FailedKeys(max_delayed=3, max_delayed_of_address=2, sleep=sleep)
        for address in ("192.0.2.1", "192.0.2.2"):
            assert await failed.refuse(WRONG, address) is WRONG  # the first is not delayed
        held = [asyncio.ensure_future(failed.refuse(WRONG, "192.0.2.1")) for _ in range(2)]
        await asyncio.sleep(0)
        assert isinstance(await failed.refuse(WRONG, "192.0.2.1"), RateLimited)
        held.append(asyncio.ensure_future(failed.refuse(WRONG, "192.0.2.2")))
        await asyncio.sleep(0)
        assert isinstance(await failed.refuse(WRONG, "192.0.2.2"), RateLimited)
        go.set()
        assert await asyncio.gather(*held) == [WRONG] * 3

    asyncio.run(run())


def test_the_table_of_addresses_is_bounded_and_the_log_says_little(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    failed = FailedKeys(clock=clock, sleep=clock.sleep)

    async def run() -> None:
        for number in range(10_000):
            await failed.refuse(WRONG, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
        clock.now_s += 10
        asyncio.run(failed.refuse(WRONG, "192.0.2.9"))
    assert failed.num_addresses == 4096
    assert [one.getMessage() for one in caplog.records if one.name.startswith("convoy")] == [
        "wrong api keys count=1 last_from=10.0.0.0",
        "wrong api keys count=10000 last_from=192.0.2.9",
    ]
