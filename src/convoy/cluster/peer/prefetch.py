"""A peer's weights for a later plan: fetched and checked while another plan runs, and not loaded yet."""

from __future__ import annotations

import logging
import threading

from convoy.cluster.peer.loaded_plan import check_plan
from convoy.cluster.weights.peer_weights import Asker, PeerWeights
from convoy.engine.run.kv_server import MAX_REASON
from convoy.errors import ConvoyError, LinkClosed, StepError
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Plan
from convoy.wire.messages.fetch import SUPERSEDED, Prepared

_log = logging.getLogger(__name__)


class PeerPrefetch:
    """Fetch the weights that a later plan needs, on one thread at a time, and tell the head."""

    def __init__(self, me: str, weights: PeerWeights) -> None:
        self._me = me
        self._weights = weights
        self._over = threading.Event()

    def begin(self, link: Link, plan: Plan) -> None:
        """Start to fetch for this plan, and stop the fetch for an earlier one."""
        self.stop()
        self._over = over = threading.Event()
        threading.Thread(
            target=self._run, args=(link, plan, over), name=f"prepare for {link.peer}", daemon=True
        ).start()

    def stop(self) -> None:
        """Stop, because a plan that is to run comes first."""
        self._over.set()

    def close(self, why: str) -> None:
        """Stop because this member ends, and end any wait for the head."""
        self.stop()
        self._weights.part_client.abandon(StepError(why))

    def _run(self, link: Link, plan: Plan, over: threading.Event) -> None:
        def watch() -> None:
            if over.is_set() or link.is_over:
                raise LinkClosed("the head no longer waits for these weights")

        error = ""
        try:
            mine = next((stage for stage in plan.stages if self._me in stage.holders), None)
            if mine is None:
                raise StepError(f"the plan has no stage for {self._me}")
            asker = Asker(plan, link, watch, loads=False)
            found = self._weights.find(asker)
            check_plan(plan, found.source.spec.num_layers, found.source.spec.max_context)
            self._weights.make_ready(asker, found, mine)
        except ConvoyError as why:
            error = why.message[:MAX_REASON] or "no reason given"
        try:
            link.send(Prepared(plan.plan_id, SUPERSEDED if over.is_set() else error))
        except ConvoyError as lost:
            _log.debug("the head could not be told: %s", lost.message)
