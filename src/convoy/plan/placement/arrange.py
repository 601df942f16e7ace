"""The order of members and the cuts between them in a run of layers that they share, under a policy's rules.

Rules leave each member one run of layers, `rules.room`. Each member must have at least one layer. Taking that
least alone, this is scheduling unit jobs between a release time and a deadline, which earliest deadline first
solves (Jackson 1955; Horn 1974); a member is stretched over layers that the next one may not have yet. Then
each cut moves as near to the wanted one as the rules allow. Between equal members, the wanted cuts make
stages take the same time (`plan.cost`); otherwise they share layers in proportion to memory,
by the bytes that each layer takes in each member's form.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

from convoy.errors import ModelError
from convoy.plan.cost import balanced, equals, layer_costs, output_cost
from convoy.plan.offer import MemberOffer
from convoy.plan.partition import consecutive, shares
from convoy.plan.placement.rules import room
from convoy.plan.span import Span
from convoy.plan.spec.model import ModelSpec
from convoy.trust.evidence.policy import PlacementRule

# Layers [start, end).
Run = tuple[int, int]
Owners = list[tuple[str, Span]]


class OutputOwner(enum.Enum):
    """Name the owner of the output among the members that share a run of layers."""

    HEAD = "the head"
    LAST = "the member with the last layers"
    ELSEWHERE = "a member with a span"


@dataclass(frozen=True)
class Rest:
    """Hold layers [start, end) that are to be shared, and the owner of the output."""

    start: int
    end: int
    output: OutputOwner = OutputOwner.HEAD

    @property
    def run(self) -> Run:
        return self.start, self.end


def arrangements(
    spec: ModelSpec, members: Sequence[MemberOffer], rest: Rest, rules: Sequence[PlacementRule]
) -> Iterator[Owners]:
    """Yield ways to give each of ``members`` a part of ``rest``, the most natural first, if any exist.

    The given order comes first if the rules allow it. A head among the members stays first or last, as it was
    given. Raises PlanError as `shares` does.
    """
    rooms = {member.name: room(spec.num_layers, rules, member) for member in members}
    tried = set()
    for order in _orders(members, rest.run, rooms):
        names = tuple(member.name for member in order)
        if names in tried:
            continue
        tried.add(names)
        cuts = _cuts(wanted_runs(spec, order, rest), [rooms[name] for name in names])
        if cuts is not None:
            yield owners_of(order, list(itertools.pairwise(cuts)), rest.output)


def wanted_runs(spec: ModelSpec, order: Sequence[MemberOffer], rest: Rest) -> list[Run]:
    """Return the parts that these members would have without rules.

    Raises PlanError as `shares` does, and ModelError for layers without weights.
    """
    sizes = {
        member.form: [one.num_bytes(member.form) for one in spec.layers[slice(*rest.run)]] for member in order
    }
    if not all(map(sum, sizes.values())):
        raise ModelError(
            f"the model's files have no weights of its layers {rest.start} to {rest.end - 1}",
            hint="download all files of the model: the index and every file that it names",
        )
    # In whole runs of these layers, since members may hold them in other forms.
    weights = [Fraction(member.share_bytes, sum(sizes[member.form])) for member in order]
    counts = _by_bytes(shares(rest.end - rest.start, weights), weights, sizes[order[0].form])
    if equals(order):
        owners = owners_of(order, consecutive(counts, rest.start), rest.output)
        extras = [output_cost(spec) if span.output else 0 for _, span in owners]
        counts = balanced(layer_costs(spec)[rest.start : rest.end], extras)
    return _between_allowed_cuts(spec, consecutive(counts, rest.start))


def _between_allowed_cuts(spec: ModelSpec, runs: list[Run]) -> list[Run]:
    """Return ``runs`` with each cut moved to the nearest one that the model allows.

    With fewer allowed cuts than are needed, they stay: a check then refuses them with the reason.
    """
    start, end = runs[0][0], runs[-1][1]
    allowed = [cut for cut in range(start + 1, end) if cut not in spec.forbidden_cuts]
    if len(allowed) < len(runs) - 1:
        return runs
    cuts, first = [start], 0
    for left, (wanted, _) in zip(reversed(range(len(runs) - 1)), runs[1:], strict=True):
        chosen = min(range(first, len(allowed) - left), key=lambda one: abs(allowed[one] - wanted))
        cuts.append(allowed[chosen])
        first = chosen + 1
    return list(itertools.pairwise([*cuts, end]))


def _by_bytes(counts: list[int], weights: Sequence[Fraction], sizes: Sequence[int]) -> list[int]:
    """Return ``counts``, or where layers differ, counts whose bytes are nearest to the shares of the weights.

    Each is at least one.
    """
    if len(set(sizes)) == 1:
        return counts
    reach, cuts = list(itertools.accumulate(sizes, initial=0)), [0]
    for number, weight in enumerate(itertools.accumulate(weights[:-1]), 1):
        wanted = weight / sum(weights) * reach[-1]
        possible = range(cuts[-1] + 1, len(sizes) - len(weights) + number + 1)
        cuts.append(min(possible, key=lambda cut: abs(reach[cut] - wanted)))
    return [end - start for start, end in itertools.pairwise([*cuts, len(sizes)])]


def owners_of(order: Sequence[MemberOffer], runs: Sequence[Run], output: OutputOwner) -> Owners:
    """Return spans of these runs, with the output at its owner."""
    last = order[-1].name
    mine = [
        member.head if output is OutputOwner.HEAD else output is OutputOwner.LAST and member.name == last
        for member in order
    ]
    return [(member.name, Span(*run, owned)) for member, run, owned in zip(order, runs, mine, strict=True)]


def _orders(members: Sequence[MemberOffer], run: Run, rooms: dict[str, Run]) -> Iterator[list[MemberOffer]]:
    """Yield the given order, then one by deadlines for each kind of members at the two ends."""
    yield list(members)
    openers = [m for m in _ends(members, members[0], rooms) if rooms[m.name][0] <= run[0]]
    closers = [m for m in _ends(members, members[-1], rooms) if rooms[m.name][1] >= run[1]]
    for closer, opener in itertools.product(closers, openers):
        if closer is not opener:
            middle = [m for m in members if m is not opener and m is not closer]
            yield [opener, *_by_deadline(middle, run[0] + 1, rooms), closer]


def _ends(members: Sequence[MemberOffer], given: MemberOffer, rooms: dict[str, Run]) -> list[MemberOffer]:
    """Return one member of each kind that may stand in the place of ``given``, with ``given`` first.

    If ``given`` is the head, only the head may stand there. The head never stands in another's place.
    """
    if given.head:
        return [given]
    kinds: dict[Run, list[MemberOffer]] = {}
    for member in [given, *members]:
        if not member.head:
            kinds.setdefault(rooms[member.name], []).append(member)
    # Two of a kind, because one of them may stand at the other end.
    return [member for same in kinds.values() for member in dict.fromkeys(same[:3])]


def _by_deadline(members: list[MemberOffer], at: int, rooms: dict[str, Run]) -> list[MemberOffer]:
    """Return the earliest deadline first among the members with begun layers; equals keep their order."""
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
    """Return the cuts nearest to the wanted ones at which each run lies in its room, or None.

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
    # Bounds of the cut before each run but the first, and of the end.
    highest.reverse()
    inner = []
    for (cut, _), low, high in zip(wanted[1:], lowest[1:], highest[:-1], strict=True):
        if low > high:
            return None
        inner.append(min(max(cut, low), high))
    return [start, *inner, end]
