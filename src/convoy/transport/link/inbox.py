"""Received items that their owner has not taken yet, bounded by items and bytes, with one share per link.

A link that floods fills only its own share. Its receiver thread then waits, which holds its peer back.
The other links keep their shares.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

from convoy.transport.link.incoming import Received, ReceivedTensor
from convoy.wire.messages.control import OBJECT_BYTES

T = TypeVar("T")


class Inbox(Generic[T]):
    """Queue received items in the order in which they came. Many threads put, one gets.

    By default a link's share holds a head's 64 steps in flight, each with its hidden state, and some
    messages.

    An item larger than ``max_bytes`` is accepted once its link has nothing else here: it was checked
    against its own limit when it came.
    """

    def __init__(self, *, max_items: int = 160, max_bytes: int = 32 * 1024 * 1024) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._changed = threading.Condition()
        self._items: deque[tuple[object, T, int]] = deque()
        # Items and bytes of each link. A link with nothing here has no entry.
        self._held: dict[object, tuple[int, int]] = {}
        self._closed = False

    def put(self, link: object, item: T, num_bytes: int) -> None:
        """Add an item, and block while the share of ``link`` is full. After `close` the item is dropped."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(link, num_bytes))
            self._append(link, item, num_bytes)

    def put_last(self, link: object, item: T) -> None:
        """Add an item without ever blocking.

        Use it for an item that comes at most once per link, such as its end.
        """
        with self._changed:
            self._append(link, item, 0)

    def get(self, timeout_s: float | None = None) -> T:
        """Return the oldest item. Raises `queue.Empty` after ``timeout_s``."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while not self._items:
                left_s = None if until_s is None else until_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise queue.Empty
                self._changed.wait(left_s)
            link, item, num_bytes = self._items.popleft()
            items, held = self._held.pop(link)
            if items > 1:
                self._held[link] = (items - 1, held - num_bytes)
            self._changed.notify_all()
            return item

    def held_bytes(self, link: object) -> int:
        """Return how many bytes of ``link`` wait here."""
        with self._changed:
            return self._held.get(link, (0, 0))[1]

    def close(self, *last: T) -> None:
        """Free every item, keep only ``last``, and release each blocked ``put``.

        Only the first call has an effect, so ``last`` stays for a reader that still looks.
        """
        with self._changed:
            if self._closed:
                return
            self._items.clear()
            self._held.clear()
            for item in last:
                self._append(None, item, 0)
            self._closed = True
            self._changed.notify_all()

    def _has_room(self, link: object, num_bytes: int) -> bool:
        items, held = self._held.get(link, (0, 0))
        return items == 0 or (items < self._max_items and held + num_bytes <= self._max_bytes)

    def _append(self, link: object, item: T, num_bytes: int) -> None:
        if self._closed:
            return
        items, held = self._held.get(link, (0, 0))
        self._held[link] = (items + 1, held + num_bytes)
        self._items.append((link, item, num_bytes))
        self._changed.notify_all()


def weight_of(received: Received) -> int:
    """Estimate the bytes of memory that ``received`` holds.

    Objects weigh many times their bytes on the wire.
    """
    if isinstance(received, ReceivedTensor):
        return received.tensor.nbytes + OBJECT_BYTES
    return received.message.weight()
