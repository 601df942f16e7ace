"""The inputs of predicted rates: a measurement of this machine, given figures, and assumptions."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.config.kernels import CUDA_KERNELS, PLAIN, measured_form, on_device
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
_HOST = "cpu"
# Of a card that is not in this machine, in bytes and products a second: about those of a card of the middle
# class. The fastest read ten times as much.
_CARD = (400e9, 40e12)
_AS_HERE = "as fast as this machine"
_AS_CARD = "as fast as a CUDA card with {:g} GB/s and {:g} GFLOP/s (--speed tells the real figures)"


@dataclass(frozen=True)
class Here:
    """Hold the member or members on this machine, and how each of them computes here."""

    name: str
    all_members: bool
    num_threads: int
    device: str
    # The hosts of a roster's members, by name.
    hosts: Mapping[str, str] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Return whether a member is on this machine."""
        own = self.hosts.get(self.name)
        return self.all_members or name == self.name or (own is not None and self.hosts.get(name) == own)

    @classmethod
    def elsewhere(cls, settings: Config, threads: int | None) -> Here:
        """Return that no member is on this machine, whose cores are measured for the hosts all the same."""
        return cls("", False, threads or settings.model.num_threads or os.cpu_count() or 1, _HOST)

    @classmethod
    def of(
        cls,
        settings: Config,
        members: Sequence[tuple[str, int | None]] | None,
        offers: Sequence[MemberOffer],
        device: str,
        threads: int | None,
        *,
        hosts: Mapping[str, str],
    ) -> Here:
        """Return the members that this machine runs. ``hosts`` has those of a roster, by name.

        A mere number of members is a cluster on this machine. Of members with names, the head is on this
        machine.
        """
        elsewhere = (
            settings.cluster.roster is not None
            if members is None
            else any(size is not None for _, size in members)
        )
        name = settings.cluster.name if members is None and elsewhere else None
        head = next(offer.name for offer in offers if offer.head)
        here = cls(name or head, not elsewhere, 1, device, hosts)
        sharing = sum(here.has(offer.name) for offer in offers)
        cores = max(1, (os.cpu_count() or 1) // max(1, sharing))
        return dataclasses.replace(here, num_threads=threads or settings.model.num_threads or cores)


@dataclass
class Measurements:
    """Hold the flags about speed. Measure this machine where they are not enough, once for each form.

    ``cache`` keeps the best measurements. For a ``rough`` question those of earlier days are enough.
    """

    here: Here
    speed_flags: Sequence[str] = ()
    trip_flags: Sequence[str] = ()
    cache: Path | None = None
    note: Note = unheard
    rough: bool = False
    _own: dict[tuple[str, str], Speed] = field(default_factory=dict)

    def speeds(self, offers: Sequence[MemberOffer], form: str = "") -> dict[str, Speed]:
        """Return the speed of every member, whose files have their weights in ``form``.

        Raises UsageError for flags that make no sense.
        """
        told = speeds_told(offers, self.speed_flags)
        for offer in offers:
            if offer.name in told:
                continue
            if offer.kernel in CUDA_KERNELS and self.here.device == _HOST:
                told[offer.name] = _of_card(measured_form(offer.kernel, form))
                continue
            # A Mac that need not run yet is taken to be as fast as this machine in float32.
            far = on_device(offer.kernel) and self.here.device == _HOST
            kept = "" if far or offer.unpacks else measured_form(offer.kernel, form)
            speed = self._measured(PLAIN if far else offer.kernel, kept)
            told[offer.name] = (
                speed if self.here.has(offer.name) else dataclasses.replace(speed, assumed=_AS_HERE)
            )
        return told

    def links(self, offers: Sequence[MemberOffer]) -> Links:
        """Return the round trip of each pair, assumed without a flag. Raises UsageError."""
        return links_of(offers, self.trip_flags, self.here)

    def _measured(self, kernel: str, form: str) -> Speed:
        from convoy.cluster.own_speed import own_speed
        from convoy.model.device import or_host

        if (kernel, form) not in self._own:
            here = self.here
            if not self.rough:
                self.note(f"measuring {kernel}{f' over {form}' if form else ''} on this machine ...")
            device = or_host(here.device, kernel)
            found = own_speed(kernel, here.num_threads, device, self.cache, form=form, rough=self.rough)
            if found.warning is not None and not self._own:
                self.note(found.warning)
            self._own[kernel, form] = found.speed
        return self._own[kernel, form]


def _of_card(form: str) -> Speed:
    from convoy.plan.card_speed import on_card
    from convoy.plan.speed import Speed

    read, flop = _CARD
    speed = on_card(Speed(read, flop), form)
    return dataclasses.replace(speed, assumed=_AS_CARD.format(read / 1e9, flop / 1e9))


def speeds_told(offers: Sequence[MemberOffer], flags: Sequence[str]) -> dict[str, Speed]:
    """Return the speeds of ``--speed``, by member. Raises UsageError for flags that make no sense."""
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
    near = {
        frozenset((one, other))
        for one, other in itertools.combinations(names, 2)
        if here.hosts.get(one) is not None and here.hosts.get(one) == here.hosts.get(other)
    }
    return Links(_ELSEWHERE_S, by_pair=pairs, near=frozenset(near), near_s=_HERE_S)


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
