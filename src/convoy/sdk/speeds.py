"""The inputs of predicted rates: a measurement of this machine, given figures, and assumptions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.errors import UsageError
from convoy.sdk.options import Note, unheard

if TYPE_CHECKING:
    from convoy.config.settings import Config
    from convoy.plan.offer import MemberOffer
    from convoy.plan.rates.rates import Links
    from convoy.plan.speed import Speed

# Assumed round trips: both ends on one machine; a wired network.
_HERE_S, _ELSEWHERE_S = 0.15e-3, 0.5e-3
_REMEDY = "name members as in --members, or in the roster"

# Sealed twice on the way, between cores of one machine.
_HERE_BYTES_PER_S = 400e6
_SPEED_COUNTS = {2, 8}
# The largest GB/s, GFLOP/s or milliseconds that make sense.
_MOST = 1e9


@dataclasses.dataclass(frozen=True)
class Here:
    """Hold the member or members on this machine, and how each of them computes here."""

    name: str
    all_members: bool
    num_threads: int
    device: str

    @classmethod
    def of(
        cls,
        settings: Config,
        members: Sequence[tuple[str, int | None]] | None,
        offers: Sequence[MemberOffer],
        device: str,
        threads: int | None,
    ) -> Here:
        """Return the members that this machine runs.

        A mere number of members is a cluster on this machine. Of members with names, the head is on this
        machine.
        """
        elsewhere = (
            settings.cluster.roster is not None
            if members is None
            else any(size is not None for _, size in members)
        )
        name = settings.cluster.name if members is None and elsewhere else None
        sharing = 1 if elsewhere else len(offers)
        num_threads = threads or settings.model.num_threads or max(1, (os.cpu_count() or 1) // sharing)
        head = next(offer.name for offer in offers if offer.head)
        return cls(name or head, not elsewhere, num_threads, device)


def speeds_of(
    offers: Sequence[MemberOffer],
    flags: Sequence[str],
    here: Here,
    cache: Path | None = None,
    note: Note = unheard,
) -> dict[str, Speed]:
    """Return the speed of every member. Measure this machine if a flag is missing for a member.

    ``cache`` keeps the best measurement. Raises UsageError for flags that make no sense.
    """
    from convoy.plan.speed import Speed

    names = [offer.name for offer in offers]
    told: dict[str, Speed] = {}
    for text in flags:
        member, numbers = _split(text, "--speed", "[NAME=]GB/S,GFLOP/S", _SPEED_COUNTS)
        if member and member not in names:
            raise UsageError(
                f"--speed {text} is for {member}, expected a member: {', '.join(names)}", hint=_REMEDY
            )
        speed = Speed.from_numbers(numbers)
        told |= {member: speed} if member else {name: speed for name in names if name not in told}
    lacking = [name for name in names if name not in told]
    if lacking:
        from convoy.cluster.own_speed import own_speed

        own = next((offer for offer in offers if offer.name == here.name), offers[0])
        found = own_speed(own.kernel, here.num_threads, here.device, cache)
        if found.warning is not None:
            note(found.warning)
        speed = found.speed
        guessed = dataclasses.replace(speed, measured=False)
        told |= {name: speed if here.all_members or name == here.name else guessed for name in lacking}
    return told


def links_of(offers: Sequence[MemberOffer], flags: Sequence[str], here: Here) -> Links:
    """Return the round trip of each pair, assumed without a flag. Raises UsageError."""
    from convoy.plan.rates.rates import Links

    names = [offer.name for offer in offers]
    pairs: dict[frozenset[str], float] = {}
    for text in flags:
        ends_text, numbers = _split(text, "--round-trip", "[NAME,NAME=]MS", {1})
        ends = [name.strip() for name in ends_text.split(",")] if ends_text else names
        if not set(ends) <= set(names) or (ends_text and len(set(ends)) != 2):
            raise UsageError(
                f"--round-trip {text} names {ends_text}, expected two of {', '.join(names)}", hint=_REMEDY
            )
        asked = {frozenset((one, other)) for one in ends for other in ends if one != other}
        pairs |= {pair: numbers[0] / 1e3 for pair in asked if ends_text or pair not in pairs}
    if here.all_members:
        return Links(_HERE_S, _HERE_BYTES_PER_S, by_pair=pairs)
    return Links(_ELSEWHERE_S, by_pair=pairs)


def _split(text: str, flag: str, form: str, counts: set[int]) -> tuple[str, list[float]]:
    names, _, values = text.rpartition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in counts or not all(0 < number < _MOST for number in numbers):
        raise UsageError(
            f"{flag} is {text}, expected {form}", hint="`convoy doctor` on a machine shows the numbers"
        )
    return names.strip(), numbers
