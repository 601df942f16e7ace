"""Over real connections the thread that adds reads its link itself: what else comes still comes, in order."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from convoy.engine.ranks.sums.pieces import PIECE_ELEMENTS
from convoy.engine.ranks.sums.sealed import RANK_TYPES, SealedCollective
from convoy.errors import CollectiveError, ConvoyError
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.wire.messages.control import FrameType, Refuse
from support.link_parts import limit_buffers
from support.links import tls_link_pair
from support.members import make_local_members
from support.rings import run_at_once

pytestmark = pytest.mark.outside

ALLOWED = RANK_TYPES | {FrameType.REFUSE}


class Two:
    """Hold ranks 0 and 1 over TLS; ``others`` has the frames outside the collective, by rank."""

    def __init__(
        self,
        directory: Path,
        options: LinkOptions | None = None,
        wrap: Callable[[Stream], Stream] | None = None,
        deadline_s: float = 10.0,
    ) -> None:
        self.members = make_local_members(["alpha", "beta"], directory)
        self.links = tls_link_pair(*self.members, options=options, wrap=wrap)
        self.ranks = [
            SealedCollective(rank, 2, {1 - rank: self.links[rank]}, 1, deadline_s) for rank in (0, 1)
        ]
        self.others: tuple[queue.SimpleQueue[Received], ...] = (queue.SimpleQueue(), queue.SimpleQueue())
        self.ended: tuple[queue.SimpleQueue[ConvoyError], ...] = (queue.SimpleQueue(), queue.SimpleQueue())
        for rank in (0, 1):
            self._start(rank)

    def _start(self, rank: int) -> None:
        mine = self.ranks[rank]

        def deliver(link: Link, received: Received) -> None:
            if not mine.deliver(link, received):
                self.others[rank].put(received)

        def ended(link: Link, error: ConvoyError) -> None:
            mine.link_ended(link, error)
            self.ended[rank].put(error)

        self.links[rank].start(deliver, ended, ALLOWED)

    def add(self, count: int, *, pause_s: float = 0.0) -> None:
        def work(one: SealedCollective) -> None:
            for number in range(count):
                found = one.all_reduce(torch.full((2048,), float(one.rank + number)))
                assert torch.equal(found, torch.full((2048,), 2.0 * number + 1)), number
                time.sleep(pause_s * one.rank)

        assert run_at_once([lambda one=one: work(one) for one in self.ranks]) == [None, None]  # type: ignore[misc]


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Two]:
    made = Two(tmp_path)
    yield made
    made.links[0].close()


@pytest.mark.skipif(not hasattr(__import__("select"), "epoll"), reason="needs epoll")
def test_the_link_is_read_by_the_thread_that_adds(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = []
    real = two.ranks[0].deliver

    def deliver(link: Link, received: Received) -> bool:
        elsewhere.append(received)
        return real(link, received)

    monkeypatch.setattr(two.ranks[0], "deliver", deliver)
    two.add(200)
    assert two.links[0].reader.lends
    assert len(elsewhere) < 100


def test_messages_between_sums_come_in_order_and_links_answer_pings(two: Two) -> None:
    stop = threading.Event()

    def talk() -> None:
        for number in range(100):
            two.links[1].send(Refuse(number, "so", ""))
        stop.set()

    talking = threading.Thread(target=talk)
    talking.start()
    two.add(100)
    talking.join(10)
    assert two.links[0].ping(5) < 5
    two.ranks[0].rest()
    found = [two.others[0].get(timeout=60) for _ in range(100)]
    assert [one.message.plan_id for one in found if isinstance(one, ReceivedMessage)] == list(range(100))  # type: ignore[attr-defined]


def test_an_order_that_comes_after_the_last_sum_is_not_held_up(two: Two) -> None:
    two.add(3)
    # A loan in use never ends by itself, so only `rest` can end this one.
    two.links[0].reader.borrow()
    two.ranks[0].rest()
    two.links[1].send(Refuse(1, "so", ""))
    two.others[0].get(timeout=60)


def test_who_forgets_to_rest_holds_the_link_up_for_a_moment_only(two: Two) -> None:
    two.add(3)
    two.ranks[1].rest()
    two.links[1].send(Refuse(1, "so", ""))
    two.others[0].get(timeout=10)


def test_a_link_that_ends_while_it_is_read_wakes_the_rank_and_is_said_to_have_ended(two: Two) -> None:
    threading.Timer(0.1, two.links[1].close).start()
    (found,) = run_at_once([lambda: two.ranks[0].all_reduce(torch.ones(3))])
    assert isinstance(found, CollectiveError)
    assert found.rank == 1
    assert two.ended[0].get(timeout=60)


def test_abort_wakes_a_rank_that_reads(tmp_path: Path) -> None:
    # An hour: the deadline of the sum does not wake the rank.
    made = Two(tmp_path, deadline_s=3600.0)
    threading.Timer(0.1, made.ranks[0].abort, [ConvoyError("enough")]).start()
    (found,) = run_at_once([lambda: made.ranks[0].all_reduce(torch.ones(3))])
    made.links[0].close()
    assert isinstance(found, CollectiveError)
    assert found.message == "enough"


def test_a_link_is_closed_here_while_it_is_read(two: Two) -> None:
    threading.Timer(0.1, two.links[0].close).start()
    (found,) = run_at_once([lambda: two.ranks[0].all_reduce(torch.ones(3))])
    assert isinstance(found, CollectiveError)


def holds_little(stream: Stream) -> Stream:
    """Limit the buffers as between two machines: a connection takes tens of kilobytes unread."""
    limit_buffers(stream, 16 * 1024)
    return stream


def test_two_ranks_that_send_a_whole_record_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    made = Two(tmp_path, wrap=holds_little)
    try:
        for num_elements in (2048, 12_000, PIECE_ELEMENTS):
            parts = [(one, torch.full((num_elements,), float(1 + one.rank))) for one in made.ranks]
            found = run_at_once([lambda one=one, part=part: one.all_reduce(part) for one, part in parts])  # type: ignore[misc]
            assert all(isinstance(total, torch.Tensor) and bool((total == 3).all()) for total in found), found
    finally:
        made.links[0].close()


def test_connections_are_replaced_while_sums_go_on(tmp_path: Path) -> None:
    made = Two(tmp_path, LinkOptions(replace_after_records=100, max_tls_records=100_000))
    redialled: list[Link] = []

    def redial() -> Link:
        fresh = tls_link_pair(*made.members)
        made.links[1].keep(fresh[1])
        redialled.append(fresh[0])
        return fresh[0]

    made.links[0].replace_with(redial)
    try:
        for _ in range(4):
            made.add(100)
        assert redialled
        assert all(link.reader.lends for link in made.links)
    finally:
        made.links[0].close()
