"""Collectives of ranks in one process, over sealed links in memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from convoy.engine.ranks.sums.sealed import RANK_TYPES, SealedCollective
from convoy.errors import ConvoyError
from convoy.testing.links import memory_link_pair
from convoy.testing.streams import Fault
from convoy.transport.link.link import Link, Received
from convoy.transport.options import LinkOptions
from support.members import make_local_members

T = TypeVar("T")
WAIT_S = 20.0


@dataclass
class RankRing:
    """Hold the collectives and their started links, by (rank, other rank). Each link delivers to its rank."""

    collectives: list[SealedCollective]
    links: dict[tuple[int, int], Link]
    ended: dict[tuple[int, int], ConvoyError] = field(default_factory=dict)

    def run(self, operation: Callable[[SealedCollective], T]) -> list[T | ConvoyError]:
        """Run an operation on every rank at once. Return each result or error."""
        return run_at_once([lambda one=one: operation(one) for one in self.collectives])  # type: ignore[misc]


def run_at_once(works: Sequence[Callable[[], T]]) -> list[T | ConvoyError]:
    """Run each in a thread of its own. Return each result, or the `ConvoyError` that it raised."""
    found: dict[int, T | ConvoyError] = {}

    def run(number: int) -> None:
        try:
            found[number] = works[number]()
        except ConvoyError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(found) == len(works), f"ranks {sorted(set(range(len(works))) - set(found))} hang, or failed"
    return [found[number] for number in range(len(works))]


@contextmanager
def rank_ring(
    world_size: int,
    *,
    plan_id: int = 1,
    deadline_s: float = WAIT_S / 2,
    faults: Iterable[Fault] = (),
    options: LinkOptions | None = None,
    wrap: Callable[[int, Callable[[Link, Received], bool]], Callable[[Link, Received], bool]] | None = None,
) -> Iterator[RankRing]:
    """Join ranks. ``faults`` apply to the writes of rank 0 to rank 1. ``wrap`` changes where links
    deliver to.
    """
    names = [f"rank{number}" for number in range(world_size)]
    members = make_local_members(names)
    links: dict[tuple[int, int], Link] = {}
    pairs = [(r, (r + 1) % world_size) for r in range(world_size)] if world_size > 2 else [(0, 1)]
    for a, b in pairs:
        befalls = faults if (a, b) == (0, 1) else ()
        links[a, b], links[b, a] = memory_link_pair(members[a], members[b], faults=befalls, options=options)
    collectives = [
        SealedCollective(
            rank,
            world_size,
            {b: link for (a, b), link in links.items() if a == rank},
            plan_id,
            deadline_s,
        )
        for rank in range(world_size)
    ]
    ring = RankRing(collectives, links)
    for (a, b), link in links.items():
        _start(ring, (a, b), link, wrap)
    try:
        yield ring
    finally:
        for collective in collectives:
            collective.abort(ConvoyError("the test is over"))
        run_at_once([link.close for link in links.values()])


def _start(ring: RankRing, pair: tuple[int, int], link: Link, wrap: object) -> None:
    mine = ring.collectives[pair[0]]
    taken = mine.deliver if wrap is None else wrap(pair[0], mine.deliver)  # type: ignore[operator]

    def deliver(link: Link, received: Received) -> None:
        assert taken(link, received), f"rank {pair[0]} did not know {type(received).__name__}"

    def ended(link: Link, error: ConvoyError) -> None:
        ring.ended[pair] = error
        mine.link_ended(link, error)

    link.start(deliver, ended, RANK_TYPES)


def in_order(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Return ((p0 + p1) + p2) + ..."""
    *_, total = itertools.accumulate(parts, add)
    return total
