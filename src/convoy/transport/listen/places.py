"""The connections that a listener holds while their clients may be strangers.

A connection *waits* for a request, *works* on an unauthorised one (a health check, a refusal, a
greeting), or is *kept*. A waiting connection gives way to a new one. A working one gives way to another
that begins to work. So a crowd of silent clients displaces only itself, and no complete request. Kept
connections never give way.

One thread owns the tables. Nothing here waits, reads or knows sockets.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from convoy.errors import QueueFull
from convoy.transport.admission import place_of

Clock = Callable[[], float]
Cut = Callable[[], object]


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """Set how many connections of each kind a listener holds.

    ``of_one_address`` limits the first two per address.
    """

    waiting: int
    working: int
    kept: int
    of_one_address: int


class Given(enum.Enum):
    """Name the reason for cutting a connection."""

    WAY = "it gave way to a newer connection"
    TIME = "its request did not arrive in time"


class ConnectionSlot:
    """Hold one connection's place. ``cut`` ends the connection without waiting; its owner may replace it.

    ``given`` says why the connection was cut, or None.
    """

    __slots__ = ("_places", "address", "cut", "deadline_s", "given", "is_over", "pool")

    def __init__(self, places: ConnectionSlots, address: str, cut: Cut) -> None:
        self._places = places
        self.address = address
        self.cut = cut
        self.deadline_s = 0.0
        self.pool: _Pool | None = None
        self.given: Given | None = None
        self.is_over = False

    def wait(self) -> None:
        """Wait for a request, which has its whole time from now on."""
        self._places.wait(self)

    def work(self) -> None:
        """Start work on a request, which ends its deadline. A kept connection stays kept."""
        self._places.work(self)

    def keep(self) -> None:
        """Keep the connection, because its request was let in: it no longer gives way.

        Raises `QueueFull` for one too many.
        """
        self._places.keep(self)

    def release(self) -> None:
        """Release the place, because the connection ended. May be called twice."""
        self._places.release(self)


class ConnectionSlots:
    """Manage the places of one listener, on one thread."""

    def __init__(self, capacity: SlotLimits, timeout_s: float, clock: Clock) -> None:
        """Set the limits. ``timeout_s`` is the time for a request to come."""
        self._timeout_s = timeout_s
        self._clock = clock
        self._waiting = _Pool(capacity.waiting, capacity.of_one_address)
        self._working = _Pool(capacity.working, capacity.of_one_address)
        self._kept = _Pool(capacity.kept, capacity.kept)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_working(self) -> int:
        return len(self._working)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self, host: str, cut: Cut) -> ConnectionSlot:
        """Return a place for a new connection from ``host``; if none is free, an older one gives way.

        The address with the most connections gives way, so a stranger that opens many displaces its own.
        """
        place = ConnectionSlot(self, place_of(host) or host, cut)
        self.wait(place)
        return place

    def wait(self, place: ConnectionSlot) -> None:
        place.deadline_s = self._clock() + self._timeout_s
        self._move(place, self._waiting)

    def work(self, place: ConnectionSlot) -> None:
        if place.pool is not self._kept:
            self._move(place, self._working)

    def keep(self, place: ConnectionSlot) -> None:
        if place.pool is self._kept or place.is_over:
            return
        if len(self._kept) >= self._kept.most:
            text = f"the server answers {self._kept.most} connections already"
            raise QueueFull(text, public=text)
        self._move(place, self._kept)

    def release(self, place: ConnectionSlot) -> None:
        place.is_over = True
        if place.pool is not None:
            place.pool.remove(place)
            place.pool = None

    def expire(self) -> int:
        """Cut the connections that sent no request in time. Return how many."""
        now_s = self._clock()
        late = [place for place in self._waiting if place.deadline_s <= now_s]
        for place in late:
            self._cut(place, Given.TIME)
        return len(late)

    def shed(self, count: int) -> int:
        """Cut up to ``count`` waiting connections, the oldest first. Return how many."""
        oldest = [place for place, _ in zip(self._waiting, range(count), strict=False)]
        for place in oldest:
            self._cut(place, Given.WAY)
        return len(oldest)

    def _move(self, place: ConnectionSlot, pool: _Pool) -> None:
        if place.is_over:
            return
        if place.pool is not None:
            place.pool.remove(place)
        loser = pool.in_the_way(place.address)
        if loser is not None:
            self._cut(loser, Given.WAY)
        pool.add(place)
        place.pool = pool

    def _cut(self, place: ConnectionSlot, given: Given) -> None:
        self.release(place)
        place.given = given
        place.cut()


class _Pool:
    """Hold places in the order in which they came, in all and by address."""

    def __init__(self, most: int, most_of_one_address: int) -> None:
        self.most = most
        self._most_of_one_address = most_of_one_address
        self._all: dict[ConnectionSlot, None] = {}
        self._by_address: dict[str, dict[ConnectionSlot, None]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[ConnectionSlot]:
        return iter(self._all)

    def add(self, place: ConnectionSlot) -> None:
        self._all[place] = None
        self._by_address.setdefault(place.address, {})[place] = None

    def remove(self, place: ConnectionSlot) -> None:
        del self._all[place]
        here = self._by_address[place.address]
        del here[place]
        if not here:
            del self._by_address[place.address]

    def in_the_way(self, address: str) -> ConnectionSlot | None:
        """Return the place that gives way to one more from ``address``: the oldest there, or of the
        fullest address.

        Return None if there is room.
        """
        here = self._by_address.get(address, {})
        if len(here) >= self._most_of_one_address:
            return next(iter(here))
        if len(self._all) >= self.most:
            fullest = max(self._by_address, key=lambda one: len(self._by_address[one]))
            return next(iter(self._by_address[fullest]))
        return None
