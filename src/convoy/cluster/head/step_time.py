"""Predict how long a decode step of a placement takes, from the head's own speed and its links.

Two assumptions replace measurements. Every member is as fast as the head. Two peers are as far from each
other as the farther of them is from the head. It is used only to decide how members share a model
(`plan.placement.modes`).
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable

from convoy.cluster.options import MemberOptions
from convoy.cluster.presence.peers import Peers
from convoy.errors import ConvoyError, LinkClosed, PeerError
from convoy.model.backends.host.speed import measure_speed
from convoy.model.device import choose_devices
from convoy.plan.placement.placement import Placement
from convoy.plan.rates.rates import Links, Workload, predict
from convoy.plan.speed import Speed
from convoy.transport.link.link import Link

_log = logging.getLogger(__name__)

_NUM_PINGS = 5
_PING_S = 1.0
# The round trip of a link that answers no ping.
_UNKNOWN_S = 0.5e-3
_CONTEXT = 512


class StepTimes:
    """Measure the speed once for each kernel, and round trips at each call."""

    def __init__(self, peers: Peers, options: MemberOptions) -> None:
        self._peers = peers
        self._options = options
        self._speeds: dict[str, Speed | None] = {}

    def step_s(self, placement: Placement) -> float | None:
        """Return the seconds of a decode step of one sequence; None if nothing could be measured."""
        speeds = {}
        for name in placement.holders:
            speed = self._speed(placement.kernels[name])
            if speed is None:
                return None
            speeds[name] = speed
        links = links_among(placement.holders, placement.head, self._round_trips(placement.holders))
        return predict(placement, speeds, links, Workload(_CONTEXT, 1)).decode.step_s

    def _speed(self, kernel: str) -> Speed | None:
        if kernel not in self._speeds:
            options = self._options
            try:
                device = choose_devices(options.device, options.kernel)[0]
                self._speeds[kernel] = measure_speed(kernel, options.num_threads, device)
            except ConvoyError as error:
                _log.warning("this machine's speed could not be measured: %s", error.message)
                self._speeds[kernel] = None
        return self._speeds[kernel]

    def _round_trips(self, names: Iterable[str]) -> dict[str, float]:
        present = self._peers.present()
        return {name: _round_trip_s(present[name][0]) for name in names if name in present}


def links_among(names: Iterable[str], head: str, round_trips: dict[str, float]) -> Links:
    """Return the round trips of all pairs, from those that begin at the head."""
    far = {name: 0.0 if name == head else round_trips.get(name, _UNKNOWN_S) for name in names}
    pairs = {frozenset((a, b)): max(far[a], far[b]) for a, b in itertools.combinations(far, 2)}
    return Links(_UNKNOWN_S, by_pair=pairs)


def _round_trip_s(link: Link) -> float:
    try:
        return min(link.ping(timeout_s=_PING_S) for _ in range(_NUM_PINGS))
    except (PeerError, LinkClosed):
        return _UNKNOWN_S
