"""A link that is ended while it is being started."""

from __future__ import annotations

import threading

from convoy.testing.links import memory_link_pair
from support.links import WAIT_S
from support.members import make_local_members

ALPHA, BETA = make_local_members(["alpha", "beta"])


def test_a_link_may_be_closed_from_elsewhere_in_the_middle_of_its_start() -> None:
    here, there = memory_link_pair(ALPHA, BETA)
    failed: list[BaseException] = []
    ended = threading.Event()
    real_start, link_threads = threading.Thread.start, threading.Thread

    def close() -> None:
        try:
            here.close("revoked meanwhile")
        except BaseException as error:  # noqa: BLE001 - looked at below
            failed.append(error)

    class Late(threading.Thread):
        """Start the receiver's thread late, only after another thread closed the link."""

        def start(self) -> None:
            closing = link_threads(target=close)
            real_start(closing)
            closing.join(WAIT_S)
            real_start(self)

    try:
        threading.Thread = Late  # type: ignore[misc]
        here.start(lambda _link, _item: None, lambda _link, _error: ended.set(), frozenset())
    finally:
        threading.Thread = link_threads  # type: ignore[misc]
    assert ended.wait(WAIT_S)
    assert not failed
    there.close()
