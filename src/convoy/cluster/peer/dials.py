"""Dials to the members that a plan needs beside its head, all at once, given up as soon as the plan is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial

from convoy.cluster.peer.successor import SuccessorDial
from convoy.transport.link.link import Link
from convoy.wire.messages.control import FrameType

Rights = frozenset[FrameType]


class Dials:
    """One thread calls `begin` and `reach`, any may call `abandon`.

    ``dial`` makes a link to a member by its name; ``start`` begins to read it, given what it may send.
    """

    def __init__(self, dial: Callable[[str], Link], start: Callable[[Link, Rights], None]) -> None:
        self._dial = dial
        self._start = start
        self._lock = threading.Lock()
        self._under_way: list[SuccessorDial] = []
        self._why = ""

    def begin(self) -> None:
        """Of another plan: what was abandoned before does not count."""
        with self._lock:
            self._why = ""

    def abandon(self, why: str) -> None:
        """Nobody wants these links any more, nor any that are asked for until `begin`."""
        with self._lock:
            self._why = self._why or why
            under_way = list(self._under_way)
        for dial in under_way:
            dial.abandon(why)

    def reach(self, allowed: Mapping[str, Rights]) -> dict[str, Link]:
        """The links. Raises what a dial raised, or `StepError` once they are abandoned."""
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
