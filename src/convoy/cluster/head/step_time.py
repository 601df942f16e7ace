"""Predict how long a decode step of a placement takes, from the head's own speed and its links.

Two assumptions replace measurements. Every member is as fast as the head. Two peers are as far from each
other as the farther of them is from the head. It is used to decide how members share a model
(`plan.placement.modes`), and to foresee rates (`head.forecast`).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import threading
from collections.abc import Iterable

from convoy.cluster.options import MemberOptions
from convoy.cluster.presence.peers import Peers
from convoy.config.kernels import measured_form
from convoy.errors import ConvoyError, LinkClosed, PeerError
from convoy.model.backends.host.speed import measure_speed
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import choose_devices, or_host
from convoy.plan.placement.placement import Placement
from convoy.plan.rates.rates import Links, RatesReport, Workload, predict
from convoy.plan.speed import Speed
from convoy.transport.link.link import Link

_log = logging.getLogger(__name__)

_NUM_PINGS = 5
_PING_S = 1.0
# The round trip of a link that answers no ping.
_UNKNOWN_S = 0.5e-3
_CONTEXT = 512


class StepTimes:
    """Measure the speed once for each kernel and form of weights, and round trips at each call."""

    def __init__(self, peers: Peers, options: MemberOptions, source: ModelSource) -> None:
        self._peers = peers
        self._options = options
        self._source = source
        # By the kernel, and the form of the file if the kernel computes in it.
        self._speeds: dict[tuple[str, str], Speed | None] = {}
        self._measuring = threading.Lock()

    def step_s(self, placement: Placement) -> float | None:
        """Return the seconds of a decode step of one sequence; None if nothing could be measured."""
        rates = self.rates(placement, Workload(_CONTEXT, 1))
        return None if rates is None else rates.decode.step_s

    def rates(
        self, placement: Placement, workload: Workload, *, may_measure: bool = True
    ) -> RatesReport | None:
        """Return the predicted rates. None if a speed could not be measured.

        Without ``may_measure``, None also if one was not measured before.
        """
        speeds = {}
        for name in placement.holders:
            speed = self._speed(placement, name, may_measure=may_measure)
            if speed is None:
                return None
            assumed = "" if name == placement.head else f"as fast as {placement.head}"
            speeds[name] = dataclasses.replace(speed, assumed=assumed)
        links = links_among(placement.holders, placement.head, self._round_trips(placement.holders))
        return predict(placement, speeds, links, workload)

    def _speed(self, placement: Placement, name: str, *, may_measure: bool) -> Speed | None:
        kernel = placement.kernels[name]
        unpacks = placement.forms[name] != kernel
        key = kernel, "" if unpacks else measured_form(kernel, self._main_form)
        if not may_measure:
            return self._speeds.get(key)
        # Two measurements at once would share the cores.
        with self._measuring:
            if key not in self._speeds:
                options = self._options
                try:
                    device = or_host(choose_devices(options.device, options.kernel)[0], kernel)
                    self._speeds[key] = measure_speed(kernel, options.num_threads, device, key[1])
                except ConvoyError as error:
                    _log.warning("this machine's speed could not be measured: %s", error.message)
                    self._speeds[key] = None
            return self._speeds[key]

    @functools.cached_property
    def _main_form(self) -> str:
        # Imported late: it imports transformers.
        from convoy.model.backends.host.form_speed import main_form

        return main_form(self._source)

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
