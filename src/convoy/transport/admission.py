"""Decide which connections may begin a handshake.

Rates are limited per address and in all; half-open connections are limited per address, per member and in
all. Nothing here waits or reads: the accept loop calls `Admission.admit`. Strangers can use up only the
strangers' share. Addresses of the roster, and addresses that a member came from before, have shares of
their own. Half-open connections without proof give way to new ones, the oldest first, so that a silent
client cannot hold a place.
"""

from __future__ import annotations

import enum
import ipaddress
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Set the limits of one listener. Rates are connections per second; a link takes two connections.

    An address is an IPv4 address or an IPv6 /64. A known address is in the roster, or a member came from
    it. It gets ``known_factor`` times a stranger's share, because several members may use it.
    """

    address_rate: float = 32.0
    address_burst: int = 64
    known_factor: int = 4
    strangers_rate: float = 128.0
    strangers_burst: int = 256
    max_half_open_per_address: int = 16
    max_half_open_per_member: int = 24
    max_addresses: int = 1024


class LinkRefusal(enum.Enum):
    """Name the reason for closing a connection before anything was read from it."""

    ADDRESS_RATE = "too many connections a second from its address"
    RATE = "too many connections a second"
    FULL = "too many handshakes are under way"


class TokenBucket:
    """Allow ``burst`` takes at once, then ``rate`` a second."""

    __slots__ = ("_at_s", "_burst", "_rate", "_tokens")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at_s = now_s

    def take(self, now_s: float) -> bool:
        """Take one token. Return False if there is none."""
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True


class Ticket:
    """Hold the place of one half-open connection. ``release`` gives it back, and may be called twice."""

    __slots__ = ("_admission", "_cut", "known", "member", "place")

    def __init__(self, admission: Admission, place: str, known: bool, cut: Callable[[], None]) -> None:
        self._admission = admission
        self._cut = cut
        self.place = place
        self.known = known
        self.member: str | None = None

    def prove(self, member: str) -> bool:
        """Record that the connection showed ``member``'s certificate: it does not give way any more.

        Return False if that member has too many half-open connections already.
        """
        return self._admission.prove(self, member)

    def release(self) -> None:
        self._admission.release(self)

    def displace(self) -> None:
        """End the connection, so that its thread wakes and ends. Only `Admission` calls this."""
        self._cut()


class Admission:
    """Manage the places of one listener. Thread-safe; its tables are bounded."""

    def __init__(self, limits: AdmissionLimits, max_half_open: int, *, clock: Clock = time.monotonic) -> None:
        self._limits = limits
        self._max_half_open = max_half_open
        # A quarter of the places stays free for known addresses.
        self._max_strangers = max_half_open - max_half_open // 4
        self._clock = clock
        self._lock = threading.Lock()
        self._strangers = TokenBucket(limits.strangers_rate, limits.strangers_burst, clock())
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()
        self._listed: frozenset[str] = frozenset()
        self._welcome: OrderedDict[str, None] = OrderedDict()
        # Oldest first, which is the order in which connections give way.
        self._tickets: OrderedDict[Ticket, None] = OrderedDict()

    @property
    def num_half_open(self) -> int:
        return len(self._tickets)

    @property
    def num_proved(self) -> int:
        """Return the number of half-open connections that showed a member's certificate."""
        with self._lock:
            return sum(ticket.member is not None for ticket in self._tickets)

    @property
    def num_addresses(self) -> int:
        """Return how many addresses the tables remember."""
        return len(self._buckets) + len(self._welcome)

    def list_addresses(self, hosts: Iterable[str]) -> None:
        """Replace the roster's addresses. Host names among ``hosts`` are ignored: nothing is looked up
        here.
        """
        listed = frozenset(place for host in hosts if (place := place_of(host)) is not None)
        with self._lock:
            self._listed = listed

    def admit(self, host: str, cut: Callable[[], None]) -> Ticket | LinkRefusal:
        """Return a place for a connection from ``host``, or the reason for refusing it.

        ``cut`` ends that connection without waiting, if it has to give way. Any thread may call it.
        """
        place = place_of(host) or host
        with self._lock:
            known = place in self._listed or place in self._welcome
            refusal = self._spend(place, known)
            if refusal is not None:
                return refusal
            loser = self._in_the_way(place, known)
            if isinstance(loser, LinkRefusal):
                return loser
            if loser is not None:
                del self._tickets[loser]
            ticket = Ticket(self, place, known, cut)
            self._tickets[ticket] = None
        # Outside the lock, because cutting a connection calls the system.
        if loser is not None:
            loser.displace()
        return ticket

    def prove(self, ticket: Ticket, member: str) -> bool:
        with self._lock:
            holds = sum(other.member == member for other in self._tickets)
            if holds >= self._limits.max_half_open_per_member:
                return False
            ticket.member = member
            return True

    def welcome(self, host: str) -> None:
        """Remember that a member's link came from ``host``, so that its next ones find a place in a flood
        of strangers.
        """
        place = place_of(host) or host
        with self._lock:
            self._welcome[place] = None
            self._welcome.move_to_end(place)
            if len(self._welcome) > self._limits.max_addresses:
                self._welcome.popitem(last=False)

    def release(self, ticket: Ticket) -> None:
        with self._lock:
            self._tickets.pop(ticket, None)

    def _spend(self, place: str, known: bool) -> LinkRefusal | None:
        limits, now_s = self._limits, self._clock()
        bucket = self._buckets.pop(place, None)
        if bucket is None:
            factor = limits.known_factor if known else 1
            bucket = TokenBucket(limits.address_rate * factor, limits.address_burst * factor, now_s)
        # Put back at the end, so that the table forgets the address that was silent for longest.
        self._buckets[place] = bucket
        if len(self._buckets) > limits.max_addresses:
            self._buckets.popitem(last=False)
        if not bucket.take(now_s):
            return LinkRefusal.ADDRESS_RATE
        if not known and not self._strangers.take(now_s):
            return LinkRefusal.RATE
        return None

    def _in_the_way(self, place: str, known: bool) -> Ticket | LinkRefusal | None:
        """Choose the ticket that gives way to a connection from ``place``.

        Return None if there is room, and a `LinkRefusal` if the new connection has to go.
        """
        limits = self._limits
        here = [ticket for ticket in self._tickets if ticket.place == place]
        if len(here) >= limits.max_half_open_per_address * (limits.known_factor // 2 if known else 1):
            return _oldest_unproved(here)
        strangers = [ticket for ticket in self._tickets if not ticket.known]
        if not known and len(strangers) >= self._max_strangers:
            return _oldest_unproved(_of_the_fullest_place(strangers))
        if len(self._tickets) < self._max_half_open:
            return None
        # With every place taken, strangers give way before known addresses.
        loser = _oldest_unproved(_of_the_fullest_place(strangers))
        return _oldest_unproved(here) if isinstance(loser, LinkRefusal) and known else loser


def place_of(host: str) -> str | None:
    """Return the address that limits count by: IPv4 whole, IPv6 by its /64.

    None for a host that is no address.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return str(address)


def _of_the_fullest_place(tickets: list[Ticket]) -> list[Ticket]:
    # Only unproved connections can give way, so only they make an address full.
    unproved = [ticket for ticket in tickets if ticket.member is None]
    counts: dict[str, int] = {}
    for ticket in unproved:
        counts[ticket.place] = counts.get(ticket.place, 0) + 1
    fullest = max(counts, key=counts.__getitem__, default=None)
    return [ticket for ticket in unproved if ticket.place == fullest]


def _oldest_unproved(tickets: list[Ticket]) -> Ticket | LinkRefusal:
    return next((ticket for ticket in tickets if ticket.member is None), LinkRefusal.FULL)
