"""Foresee the plan after the loss of each member, and with one more machine, with its predicted rate.

The planner answers, on a thread of its own: once for each plan and each change of the members' offers.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.head.planning import Planner
from convoy.cluster.options import HeadOptions
from convoy.cluster.status import Forecast, LossForecast, PlanForecast
from convoy.config.kernels import on_device
from convoy.errors import ConvoyError
from convoy.plan.placement.placement import Placement
from convoy.plan.rates.rates import RatesReport, Workload
from convoy.plan.report import report
from convoy.plan.span import JOINT, layers_text
from convoy.wire.messages.control import Hello

_log = logging.getLogger(__name__)

# Of the machine that is added: a common size.
ADDED_BYTES = 24 * 10**9
# No member has a name with a space.
_ADDED = "one more"
_CONTEXT = 512
_CLOSE_S = 5.0


class PredictRates(Protocol):
    """Return the rates of a placement; see `StepTimes.rates`."""

    def __call__(
        self, placement: Placement, workload: Workload, *, may_measure: bool
    ) -> RatesReport | None: ...


@dataclass(frozen=True, slots=True)
class _Asked:
    """Hold what a forecast is for. Another plan or another offer makes it stale."""

    plan_id: int
    hellos: Mapping[str, Hello]


class Forecaster:
    """Hold the newest forecast, and compute another one when it is stale."""

    def __init__(self, head: str, planner: Planner, predict: PredictRates, options: HeadOptions) -> None:
        self._head = head
        self._planner = planner
        self._predict = predict
        self._options = options
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._found: tuple[_Asked, Forecast] | None = None
        # The forecast whose machine was measured, or could be.
        self._measured: _Asked | None = None
        # What could not be computed. It is not tried again.
        self._failed: _Asked | None = None

    def find(self, active: ActivePlan, hellos: Mapping[str, Hello], *, is_idle: bool) -> Forecast | None:
        """Return the forecast for this plan and these offers; None until it is computed. Returns at once.

        The rates need the speed of this machine. It is measured only while ``is_idle``, so that no request
        waits, and never on a device, where stages fill the memory.
        """
        asked = _Asked(active.plan.plan_id, hellos)
        may_measure = is_idle and not any(map(on_device, active.kernels))
        with self._lock:
            found = None if self._found is None or self._found[0] != asked else self._found[1]
            lacks_rates = found is not None and found.running.tokens_per_s is None
            is_due = found is None or (lacks_rates and may_measure and self._measured != asked)
            if is_due and asked != self._failed and self._thread is None and not self._closed:
                self._thread = threading.Thread(
                    target=self._work, args=(asked, active, may_measure), name="foresee plans"
                )
                self._thread.start()
        return found

    def close(self) -> None:
        """Compute nothing more. Waits a moment for a measurement, which fails while the process ends."""
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None:
            thread.join(_CLOSE_S)

    def _work(self, asked: _Asked, active: ActivePlan, may_measure: bool) -> None:
        try:
            found = self._foresee(asked.hellos, active, may_measure=False)
            with self._lock:
                self._found = asked, found
            if may_measure and found.running.tokens_per_s is None and not self._closed:
                found = self._foresee(asked.hellos, active, may_measure=True)
                with self._lock:
                    self._found, self._measured = (asked, found), asked
        except Exception as error:  # noqa: BLE001 - its text may be a library's, and the head goes on without
            _log.warning("the plans after a loss could not be foreseen: %s", type(error).__name__)
            self._failed = asked
        finally:
            self._thread = None

    def _foresee(self, hellos: Mapping[str, Hello], active: ActivePlan, *, may_measure: bool) -> Forecast:
        before = active.placement
        rates = self._rates(before, may_measure)
        losses = []
        for name in before.holders:
            if name != self._head and not self._closed:
                others = {other: hello for other, hello in hellos.items() if other != name}
                losses.append(LossForecast(name, self._after(others, before)))
        head = msgspec.structs.replace(hellos[self._head], memory_bytes=ADDED_BYTES, standby=False)
        return Forecast(
            context=self._workload(before).context,
            running=_describe(before, rates),
            losses=losses,
            added_bytes=ADDED_BYTES,
            added=self._after({**hellos, _ADDED: head}, None),
            assumed=[] if rates is None else rates.assumed,
        )

    def _after(self, hellos: Mapping[str, Hello], before: Placement | None) -> PlanForecast:
        """Return the plan of these members. Their kernels were measured for the plan that runs, if at all."""
        try:
            placement = self._planner.foresee(hellos, before, self._known_step_s)
        except ConvoyError as error:
            return PlanForecast(refused=error.message)
        return _describe(placement, self._rates(placement, may_measure=False))

    def _rates(self, placement: Placement, may_measure: bool) -> RatesReport | None:
        return self._predict(placement, self._workload(placement), may_measure=may_measure)

    def _known_step_s(self, placement: Placement) -> float | None:
        """Return the seconds of a step of one sequence; None where nothing was measured before."""
        rates = self._predict(placement, Workload(_CONTEXT, 1), may_measure=False)
        return None if rates is None else rates.decode.step_s

    def _workload(self, placement: Placement) -> Workload:
        options = self._options.for_kernels(placement.kernels.values())
        return Workload(min(_CONTEXT, placement.spec.max_context), options.at_once, options.chunk_tokens)


def _describe(placement: Placement, rates: RatesReport | None) -> PlanForecast:
    return PlanForecast(
        layers={JOINT.join(one.holders): layers_text(one.start, one.end) for one in placement.stages},
        tokens_per_s=None if rates is None else rates.decode.tokens_per_s,
        limit="" if rates is None else rates.decode.limit,
        max_kv_tokens=report(placement).max_kv_tokens,
    )
