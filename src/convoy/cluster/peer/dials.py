"""Dial the members that a plan needs beside its head, all at once, and stop as soon as the plan ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from convoy.cluster.peer.successor import SuccessorDial
from convoy.transport.link.link import Link
from convoy.wire.messages.control import FrameType

Rights = frozenset[FrameType]


class Dials:
    """Dial the neighbours of one plan. One thread calls `begin` and `reach`; any thread may call `abandon`.

    ``dial`` makes a link to a member by its name. ``start`` begins to read a link, given the frame types
    that the member may send.
    """

    def __init__(self, dial: Callable[[str], Link], start: Callable[[Link, Rights], None]) -> None:
        self._dial = dial
        self._start = start
        self._lock = threading.Lock()
        self._under_way: list[SuccessorDial] = []
        self._why = ""

    def begin(self) -> None:
        """Start dialling for another plan: an earlier `abandon` no longer counts."""
        with self._lock:
            self._why = ""

    def abandon(self, why: str) -> None:
        """Give up these links, and all that are asked for until the next `begin`."""
        with self._lock:
            self._why = self._why or why
            under_way = list(self._under_way)
        for dial in under_way:
            dial.abandon(why)

    def reach(self, allowed: Mapping[str, Rights]) -> dict[str, Link]:
        """Return a link to each named member.

        Raises the error of a failed dial, or `StepError` after `abandon`.
        """
        dials = {name: SuccessorDial(partial(self._dial, name), name) for name in allowed}
        with self._lock:
            self._under_way, why = list(dials.values()), self._why
        if why:
            self.abandon(why)
        links: dict[str, Link] = {}
        try:
            for name, dial in dials.items():
                links[name] = dial.wait()
                self._start(links[name], allowed[name])
        except BaseException:
            for name, dial in dials.items():
                if name in links:
                    links[name].dismiss("the plan is over")
                else:
                    dial.abandon("another member could not be reached")
            raise
        finally:
            with self._lock:
                self._under_way = []
        return links
