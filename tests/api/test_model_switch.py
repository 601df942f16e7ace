"""Requests for several models of which one is loaded at a time: order, bounds, failures and idle times."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from convoy.api.model_switch import ModelSwitch, SwitchOptions
from convoy.api.openai.parsed_request import keep_alive_s
from convoy.api.problem import answer_for, headers_for
from convoy.api.refusals import ModelNotLoaded
from convoy.errors import CapacityError, Draining, PeerLeft, RequestError
from support.fake_loader import FakeLoader


class FakeTimers:
    """Call functions once their time has come, as a test says."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now_s + seconds, next(self._numbers), call))

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        while self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)[2]()


class Scene:
    """Hold a switch over a fake loader, with the requests that have begun and not ended."""

    def __init__(self, **options: Any) -> None:
        self.loader, self.timers = FakeLoader(), FakeTimers()
        self.switch = ModelSwitch(self.loader, SwitchOptions(later=self.timers.later, **options))
        self.begun: list[str] = []

    def request(
        self, name: str, label: str = "", keep_alive_s: float | None = None, *, may_shorten: bool = True
    ) -> tuple[asyncio.Task[None], asyncio.Event]:
        """Return a request that runs until its event is set."""
        end = asyncio.Event()

        async def run() -> None:
            async with self.switch.hold(name, keep_alive_s, may_shorten=may_shorten):
                assert self.loader.loaded == name
                self.begun.append(label or name)
                await end.wait()

        return asyncio.create_task(run()), end

    async def ask(self, keep_alive_s: float | None = None, *, may_shorten: bool = True) -> None:
        """Wait for a request for a that ends at once."""
        task, end = self.request("a", "", keep_alive_s, may_shorten=may_shorten)
        end.set()
        await task

    async def is_kept(self, idle_s: float) -> bool:
        """Return whether the model stays for so long. A request for it ends that time."""
        before = len(self.loader.done)
        self.timers.pass_s(idle_s)
        # It waits for a change that has begun.
        await self.switch.load("a")
        return len(self.loader.done) == before

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                await asyncio.sleep(0.001)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


def test_requests_for_the_loaded_model_run_side_by_side() -> None:
    async def test() -> None:
        scene = Scene()
        asked = [scene.request("a"), scene.request("a")]
        await scene.until(lambda: scene.begun == ["a", "a"])
        for task, end in asked:
            end.set()
            await task
        assert scene.loader.done == []

    run(test)


def test_another_model_waits_for_the_running_answers_and_later_ones_wait_behind_it() -> None:
    async def test() -> None:
        scene = Scene()
        first, ended = scene.request("a", "a1")
        await scene.until(lambda: scene.begun == ["a1"])
        others = [scene.request("b", "b1"), scene.request("a", "a2"), scene.request("b", "b2")]
        await scene.until(lambda: scene.switch.num_waiting == 3)
        assert scene.begun == ["a1"]
        assert scene.loader.done == []
        ended.set()
        await first
        # One change serves every request for the model.
        await scene.until(lambda: len(scene.begun) == 3)
        # They begin together, in any order: each was checked on a thread of its own.
        assert (scene.begun[0], *sorted(scene.begun[1:])) == ("a1", "b1", "b2")
        for _, end in others:
            end.set()
        await asyncio.gather(*(task for task, _ in others))
        assert scene.begun[3:] == ["a2"]
        assert scene.loader.done == ["b", "a"]

    run(test)


def test_what_does_not_fit_is_refused_while_the_other_model_runs_on() -> None:
    async def test() -> None:
        scene = Scene()
        scene.loader.too_large.add("b")
        first, ended = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        with pytest.raises(CapacityError, match="b does not fit"):
            await scene.request("b")[0]
        assert (scene.loader.loaded, scene.loader.done) == ("a", [])
        ended.set()
        await first

    run(test)


def test_one_request_too_many_gets_503_with_a_time() -> None:
    async def test() -> None:
        scene = Scene(max_waiting=1, wait_s=300.0)
        first, ended = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        waits, end = scene.request("b")
        await scene.until(lambda: scene.switch.num_waiting == 1)
        with pytest.raises(ModelNotLoaded, match="1 requests wait") as many:
            await scene.request("b")[0]
        assert answer_for(many.value).status == 503
        assert int(headers_for(many.value)["retry-after"]) >= 1
        for done in (ended, end):
            done.set()
        await asyncio.gather(first, waits)
        assert scene.loader.done == ["b"]

    run(test)


def test_a_request_that_waits_too_long_gets_503_and_holds_nothing_up() -> None:
    async def test() -> None:
        scene = Scene(wait_s=0.01)
        first, ended = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        with pytest.raises(ModelNotLoaded, match="b was not there within") as late:
            await scene.request("b")[0]
        assert answer_for(late.value).status == 503
        assert int(headers_for(late.value)["retry-after"]) >= 1
        # No request for it waits any more, so the loaded model serves at once.
        second, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a", "a"])
        for done in (ended, end):
            done.set()
        await asyncio.gather(first, second)
        assert scene.loader.done == []

    run(test)


def test_a_client_that_leaves_while_it_waits_asks_for_no_change() -> None:
    async def test() -> None:
        scene = Scene()
        first, ended = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        gone = scene.request("b")[0]
        await scene.until(lambda: scene.switch.num_waiting == 1)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        ended.set()
        await first
        await scene.switch.load("a")
        assert scene.loader.done == []

    run(test)


def test_a_load_that_fails_ends_its_requests_and_the_next_one_loads_again() -> None:
    async def test() -> None:
        scene = Scene()
        scene.loader.failure = PeerLeft("beta left")
        with pytest.raises(PeerLeft):
            await scene.switch.load("b")
        assert scene.loader.loaded is None
        await scene.switch.load("a")
        assert scene.loader.done == ["a"]

    run(test)


def test_an_idle_model_is_unloaded_after_its_time_and_loaded_by_the_next_request() -> None:
    async def test() -> None:
        scene = Scene(keep_alive_s=300.0)
        scene.switch.begin()
        scene.timers.pass_s(299)
        await scene.switch.load("a")
        # The use has begun the time anew.
        scene.timers.pass_s(299)
        await scene.switch.load("a")
        assert scene.loader.done == []
        scene.timers.pass_s(299)
        scene.timers.pass_s(1)
        await scene.until(lambda: scene.loader.done == [None])
        await scene.switch.load("a")
        assert scene.loader.done == [None, "a"]

    run(test)


def test_a_running_answer_keeps_its_model_whatever_the_time() -> None:
    async def test() -> None:
        scene = Scene(keep_alive_s=1.0)
        scene.switch.begin()
        task, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        scene.timers.pass_s(3600)
        # It would wait for a change that had begun.
        await scene.switch.load("a")
        assert scene.loader.done == []
        end.set()
        await task

    run(test)


@pytest.mark.parametrize(("asked_s", "is_unloaded"), [(0.0, True), (-1.0, False)])
def test_a_request_says_how_long_its_model_stays(*, asked_s: float, is_unloaded: bool) -> None:
    async def test() -> None:
        scene = Scene(keep_alive_s=10.0)
        await scene.ask(asked_s)
        assert await scene.is_kept(0 if is_unloaded else 3600) is not is_unloaded
        # The operator's time counts again.
        assert await scene.is_kept(9)
        assert not await scene.is_kept(10)

    run(test)


@pytest.mark.parametrize("own_s", [None, 10.0])
def test_with_keys_a_request_keeps_its_model_longer_and_never_shorter(own_s: float | None) -> None:
    async def test() -> None:
        scene = Scene(keep_alive_s=own_s, knows_several=True)
        for asked_s in (0.0, 9.0):
            await scene.ask(asked_s, may_shorten=False)
            assert await scene.is_kept(9)
        await scene.ask(20.0, may_shorten=False)
        assert await scene.is_kept(19)
        await scene.ask(-1.0, may_shorten=False)
        assert await scene.is_kept(3600)
        # The operator's time counts again.
        assert await scene.is_kept(10) is (own_s is None)

    run(test)


def test_a_head_that_unloads_nothing_ignores_how_long_a_request_keeps_its_model() -> None:
    async def test() -> None:
        scene = Scene()
        await scene.ask(0.0)
        assert await scene.is_kept(3600)
        several = Scene(knows_several=True)
        await several.ask(0.0)
        assert not await several.is_kept(0)

    run(test)


def test_an_unload_waits_for_the_running_answers() -> None:
    async def test() -> None:
        scene = Scene()
        task, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        unloading = asyncio.create_task(scene.switch.unload("a"))
        await scene.until(lambda: scene.switch.num_waiting == 1)
        assert scene.loader.done == []
        end.set()
        await asyncio.gather(task, unloading)
        assert scene.loader.done == [None]

    run(test)


def test_an_unload_that_waits_holds_no_request_for_the_loaded_model_up() -> None:
    async def test() -> None:
        scene = Scene()
        first, first_end = scene.request("a", "a1")
        await scene.until(lambda: scene.begun == ["a1"])
        unloading = asyncio.create_task(scene.switch.unload("a"))
        await scene.until(lambda: scene.switch.num_waiting == 1)
        second, second_end = scene.request("a", "a2")
        await scene.until(lambda: scene.begun == ["a1", "a2"])
        # One that waits behind another model begins once that one is gone.
        gone, third = scene.request("b")[0], scene.request("a", "a3")
        await scene.until(lambda: scene.switch.num_waiting == 3)
        gone.cancel()
        await scene.until(lambda: scene.begun == ["a1", "a2", "a3"])
        for end in (first_end, third[1]):
            end.set()
        await asyncio.gather(first, third[0])
        assert (unloading.done(), scene.loader.done) == (False, [])
        second_end.set()
        await asyncio.gather(second, unloading)
        assert scene.loader.done == [None]

    run(test)


def test_an_unload_is_refused_after_the_time_to_wait() -> None:
    async def test() -> None:
        scene = Scene(wait_s=0.01)
        task, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        with pytest.raises(ModelNotLoaded, match="the end of all requests was not there"):
            await scene.switch.unload("a")
        end.set()
        await task
        assert scene.loader.done == []

    run(test)


def test_an_unload_behind_another_model_unloads_nothing() -> None:
    async def test() -> None:
        scene = Scene()
        task, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        other, other_end = scene.request("b")
        await scene.until(lambda: scene.switch.num_waiting == 1)
        unloading = asyncio.create_task(scene.switch.unload("a"))
        await scene.until(lambda: scene.switch.num_waiting == 2)
        end.set()
        # It ends while b runs, because a is not loaded any more.
        await scene.until(unloading.done)
        await asyncio.gather(task, unloading)
        await scene.until(lambda: scene.begun == ["a", "b"])
        other_end.set()
        await other
        await scene.switch.load("b")
        assert scene.loader.done == ["b"]

    run(test)


@pytest.mark.parametrize("fails", [False, True])
def test_an_unload_during_the_load_of_its_model_waits_for_that(*, fails: bool) -> None:
    async def test() -> None:
        scene = Scene()
        scene.loader.gate.clear()
        scene.loader.failure = PeerLeft("beta left") if fails else None
        loading = asyncio.create_task(scene.switch.load("b"))
        await scene.until(lambda: scene.loader.loaded is None)
        unloading = asyncio.create_task(scene.switch.unload("b"))
        await scene.until(lambda: unloading.done() or scene.switch.num_waiting == 2)
        assert not unloading.done()
        # Another model is not loaded, so it is done at once.
        await scene.switch.unload("c")
        scene.loader.gate.set()
        await unloading
        await asyncio.gather(loading, return_exceptions=True)
        assert (scene.loader.loaded, scene.loader.done) == (None, [] if fails else ["b", None])

    run(test)


def test_all_that_wait_can_be_ended_with_an_error() -> None:
    async def test() -> None:
        scene = Scene()
        task, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        waiting = [scene.request("b")[0], asyncio.create_task(scene.switch.unload("a"))]
        await scene.until(lambda: scene.switch.num_waiting == 2)
        scene.switch.fail(Draining("the server shut down"))
        for one in waiting:
            with pytest.raises(Draining):
                await one
        end.set()
        await task
        assert (scene.switch.num_waiting, scene.loader.done) == (0, [])

    run(test)


def test_a_request_that_comes_during_a_load_waits_for_it() -> None:
    async def test() -> None:
        scene = Scene()
        scene.loader.gate.clear()
        first, one = scene.request("b", "b1")
        await scene.until(lambda: scene.loader.loaded is None)
        second, two = scene.request("b", "b2")
        await scene.until(lambda: scene.switch.num_waiting == 2)
        scene.loader.gate.set()
        await scene.until(lambda: sorted(scene.begun) == ["b1", "b2"])
        one.set()
        two.set()
        await asyncio.gather(first, second)
        assert scene.loader.done == ["b"]

    run(test)


def test_every_change_is_told_in_one_line() -> None:
    async def test() -> None:
        told: list[tuple[str | None, str]] = []
        scene = Scene(on_change=lambda loaded, line: told.append((loaded, line.partition(" after ")[0])))
        await scene.switch.load("b")
        await scene.switch.unload("b")
        await scene.switch.load("a")
        scene.loader.failure = PeerLeft("beta left")
        with pytest.raises(PeerLeft):
            await scene.switch.load("b")
        assert told == [
            ("b", "b is loaded in place of a"),
            (None, "b is unloaded; the next request loads its model"),
            ("a", "a is loaded"),
            (None, "b could not be loaded; the next request tries again"),
        ]

    run(test)


def test_a_change_that_cannot_be_told_is_a_change() -> None:
    def tell(_loaded: str | None, _line: str) -> None:
        raise BrokenPipeError

    async def test() -> None:
        scene = Scene(on_change=tell)
        await scene.switch.load("b")
        await scene.switch.load("a")
        assert scene.loader.done == ["b", "a"]

    run(test)


def test_the_time_until_an_unload_begins_with_the_end_of_a_request() -> None:
    async def test() -> None:
        scene = Scene(keep_alive_s=300.0)
        task, end = scene.request("a")
        await scene.until(lambda: scene.begun == ["a"])
        assert scene.switch.expires_in_s == 300.0
        end.set()
        await task
        left_s = scene.switch.expires_in_s
        assert left_s is not None
        assert 200 < left_s < 300
        await scene.ask(-1.0)
        assert scene.switch.expires_in_s is None

    run(test)


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, None),
        (0, 0),
        ("0", 0),
        (90, 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("-1s", -1),
        (-5, -1),
        ("1.5s", 1.5),
        ("never", -1),
        ("-1", -1),
        ("1h", 3600),
        ("90s", 90),
        ("0.5", 0.5),
    ],
)
def test_keep_alive_is_read_as_seconds_or_a_duration(
    given: float | str | None, seconds: float | None
) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", ["soon", "5 m", "", "m", float("nan"), "1" * 400])
def test_another_keep_alive_is_refused(given: float | str) -> None:
    with pytest.raises(RequestError, match="keep_alive"):
        keep_alive_s(given)
