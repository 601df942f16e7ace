"""Inboxes are bounded by items and bytes, and one link's flood is its own affair."""

from __future__ import annotations

import queue
import threading

import pytest

from convoy.transport.link.inbox import Inbox, weight_of
from convoy.transport.link.incoming import ReceivedMessage, ReceivedTensor
from convoy.wire.messages.control import BlockGrant, Row, Step
from convoy.wire.tensor import WireTensor

WAIT_S = 20.0


class Flood:
    """Deliver, as a link's receiver thread, more items than may wait."""

    def __init__(self, inbox: Inbox[str], link: str, num_items: int, num_bytes: int) -> None:
        self.delivered = 0
        self.done = threading.Event()

        def deliver() -> None:
            for i in range(num_items):
                inbox.put(link, f"{link} {i}", num_bytes)
                self.delivered = i + 1
            self.done.set()

        threading.Thread(target=deliver, daemon=True).start()

    def held_back(self, at: int) -> bool:
        """Return whether it delivered ``at`` items and waits."""
        while self.delivered < at:
            if self.done.wait(0.001):
                return False
        return not self.done.wait(0.05)


@pytest.mark.parametrize(("num_bytes", "waiting"), [(1, 4), (40, 2), (1000, 1)])
def test_a_flood_waits_and_blocks_only_itself(num_bytes: int, waiting: int) -> None:
    inbox: Inbox[str] = Inbox(max_items=4, max_bytes=100)
    flood = Flood(inbox, "flood", 50, num_bytes)
    assert flood.held_back(waiting)
    assert flood.delivered == waiting
    assert inbox.held_bytes("flood") == waiting * num_bytes
    inbox.put("honest", "honest", 1000)  # at once: its share is its own
    taken = [inbox.get(WAIT_S) for _ in range(51)]
    assert taken.index("honest") == waiting
    assert [item for item in taken if item != "honest"] == [f"flood {i}" for i in range(50)]
    assert inbox.held_bytes("flood") == 0


def test_the_end_of_a_link_never_waits() -> None:
    inbox: Inbox[str] = Inbox(max_items=1)
    inbox.put("link", "item", 1)
    inbox.put_last("link", "ended")
    assert [inbox.get(), inbox.get()] == ["item", "ended"]


def test_nothing_within_the_time_is_said() -> None:
    with pytest.raises(queue.Empty):
        Inbox[str]().get(0.01)


def test_a_closed_inbox_lets_everyone_go_and_holds_nothing() -> None:
    inbox: Inbox[str] = Inbox(max_items=2)
    flood = Flood(inbox, "flood", 10, 1)
    assert flood.held_back(2)
    inbox.close("over")
    assert flood.done.wait(WAIT_S)
    assert inbox.held_bytes("flood") == 0
    assert inbox.get(WAIT_S) == "over"
    with pytest.raises(queue.Empty):
        inbox.get(0.0)


def test_closing_twice_keeps_the_first_ones_last_word() -> None:
    inbox: Inbox[str] = Inbox()
    inbox.close("the link ended")
    inbox.close("the engine was closed")
    inbox.close()
    assert inbox.get(WAIT_S) == "the link ended"


def test_what_is_received_weighs_at_least_its_bytes() -> None:
    tensor = WireTensor("float32", (1, 1000), bytes(4000))
    assert weight_of(ReceivedTensor(0, 0, 1, tensor)) >= 4000
    step = Step(
        0, [1] * 100, [BlockGrant.append(1, 0, [7] * 1000)] * 10, [Row(1, 0, 1, 1)] * 100, bytes(4000)
    )
    assert weight_of(ReceivedMessage(0, 0, step)) >= 40 * 10_100 + 110 * 100 + 4000
    tagged = Step(
        0, [], [BlockGrant.append(1, 0, [7], bytes(4000))], [Row(1, 0, 1, 1, bytes(16), bytes(4000))], b""
    )
    assert weight_of(ReceivedMessage(0, 0, tagged)) >= 8000
    assert weight_of(ReceivedMessage(0, 0, Step(0, [], [], [], b""))) < 1000
