"""Who comes after whom, and where the cuts are: members that share a run of layers, under a policy's rules.

Rules leave each member one run of layers, `rules.room`. Taking the least that each member must have, one
layer, this is scheduling unit jobs between a release time and a deadline, which earliest deadline first
solves (Jackson 1955; Horn 1974); a member is stretched over layers that the next one may not have yet. Then
each cut moves as near to the shares by memory as the rules let it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from convoy.plan.offer import MemberOffer
from convoy.plan.partition import consecutive, shares
from convoy.plan.rules import room
from convoy.trust.policy import PlacementRule

Run = tuple[int, int]  # layers [start, end)


def arrangements(
    members: Sequence[MemberOffer], run: Run, num_layers: int, rules: Sequence[PlacementRule]
) -> Iterator[list[tuple[MemberOffer, Run]]]:
    """Ways to give each of ``members`` a part of ``run``, the most natural first; none where no way exists.

    The first is always the given order where the rules allow it. A head among the members stays first or
    last, as it was given. Raises PlanError as `shares` does.
    """
    counts = shares(run[1] - run[0], [member.memory_bytes for member in members])
    rooms = {member.name: room(num_layers, rules, member) for member in members}
    tried = set()
    for order in _orders(members, run, rooms):
        names = tuple(member.name for member in order)
        if names in tried:
            continue
        tried.add(names)
        if names != tuple(member.name for member in members):
            counts = shares(run[1] - run[0], [member.memory_bytes for member in order])
        cuts = _cuts(consecutive(counts, run[0]), [rooms[name] for name in names])
        if cuts is not None:
            yield list(zip(order, itertools.pairwise(cuts), strict=True))


def _orders(members: Sequence[MemberOffer], run: Run, rooms: dict[str, Run]) -> Iterator[list[MemberOffer]]:
    """The given order, then one by deadlines for each kind of member that may open and may close the run."""
    yield list(members)
    openers = [m for m in _ends(members, members[0], rooms) if rooms[m.name][0] <= run[0]]
    closers = [m for m in _ends(members, members[-1], rooms) if rooms[m.name][1] >= run[1]]
    for closer, opener in itertools.product(closers, openers):
        if closer is not opener:
            middle = [m for m in members if m is not opener and m is not closer]
            yield [opener, *_by_deadline(middle, run[0] + 1, rooms), closer]


def _ends(members: Sequence[MemberOffer], given: MemberOffer, rooms: dict[str, Run]) -> list[MemberOffer]:
    """One of each kind that may stand where ``given`` stands: itself first; itself alone if it is the head,
    and never the head in another's place.
    """
    if given.head:
        return [given]
    kinds: dict[Run, list[MemberOffer]] = {}
    for member in [given, *members]:
        if not member.head:
            kinds.setdefault(rooms[member.name], []).append(member)
    # Two of a kind, because one of them may be taken for the other end.
    return [member for same in kinds.values() for member in dict.fromkeys(same[:3])]


def _by_deadline(members: list[MemberOffer], at: int, rooms: dict[str, Run]) -> list[MemberOffer]:
    """Earliest deadline first among those whose layers have begun; equals stay as they were given."""
    waiting, order = list(members), []
    while waiting:
        begun = [m for m in waiting if rooms[m.name][0] <= at]
        if not begun:
            at = min(rooms[m.name][0] for m in waiting)
            continue
        chosen = min(begun, key=lambda m: rooms[m.name][1])
        waiting.remove(chosen)
        order.append(chosen)
        at += 1
    return order


def _cuts(wanted: Sequence[Run], rooms: Sequence[Run]) -> list[int] | None:
    """The cuts nearest to the wanted ones at which each run lies in its room, or None where there are none.

    Cuts ascend by at least one and lie between bounds that do the same, so clamping keeps them apart.
    """
    start, end = wanted[0][0], wanted[-1][1]
    if rooms[0][0] > start or rooms[-1][1] < end:
        return None
    lowest, highest = [start], [end]
    for begin, _ in rooms[1:]:
        lowest.append(max(begin, lowest[-1] + 1))
    for _, limit in reversed(rooms[:-1]):
        highest.append(min(limit, highest[-1] - 1))
    highest.reverse()  # of the cut before each run but the first, and of the end
    inner = []
    for (cut, _), low, high in zip(wanted[1:], lowest[1:], highest[:-1], strict=True):
        if low > high:
            return None
        inner.append(min(max(cut, low), high))
    return [start, *inner, end]
