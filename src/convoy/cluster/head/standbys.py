"""Members that stand by for the loss of another, and the stage that each has loaded for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.status import StandbyStatus
from convoy.config.kernels import held_form
from convoy.errors import ConvoyError
from convoy.plan.span import Span
from convoy.plan.spec.sharding import rank_bytes
from convoy.transport.link.link import Link, Received, ReceivedMessage
from convoy.wire.messages.control import Hello, Plan, Ready

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Preload:
    """Record the plan that one standby was asked to load, on one link. ``plan`` None: it lacks the memory."""

    link: Link
    plan_id: int
    plan: Plan | None
    loaded: bool = False


class Standbys:
    """Track standbys. The thread that plans and receiver threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._preloads: dict[str, _Preload] = {}

    def preload(self, name: str, link: Link, plan: Plan | None) -> None:
        """Ask ``name`` to load its stage of ``plan``: once for a link and a plan, however often called."""
        plan_id = 0 if plan is None else plan.plan_id
        with self._lock:
            asked = self._preloads.get(name)
            if asked is not None and asked.link is link and asked.plan_id == plan_id:
                return
            self._preloads[name] = _Preload(link, plan_id, plan)
        if plan is None:
            _log.info("%s is a standby without the memory for any stage in advance", name)
            return
        try:
            link.post(plan)
        except ConvoyError as error:
            _log.info("%s preloads nothing: %s", name, error.message)

    def preload_largest(
        self,
        active: ActivePlan,
        head: str,
        present: Mapping[str, tuple[Link, Hello]],
        in_place_of: Callable[[Plan, str, str, Hello], Plan],
    ) -> None:
        """Ask the standbys of ``present`` that have the memory to load the stage of the largest peer."""
        weights = {name: num_bytes for name, num_bytes in active.weight_bytes.items() if name != head}
        largest = max(weights, key=lambda name: weights[name], default=None)
        if largest is None:
            return
        for name, (link, hello) in present.items():
            if not hello.standby or name in active.members:
                continue
            fits = hello.memory_bytes >= _bytes_on(hello, active, largest)
            plan = in_place_of(active.plan, largest, name, hello) if fits else None
            self.preload(name, link, plan)

    def note(self, link: Link, received: Received) -> None:
        """Handle a message of a member without a stage."""
        if not isinstance(received, ReceivedMessage) or not isinstance(received.message, Ready):
            return
        with self._lock:
            asked = self._preloads.get(link.peer)
            is_new = asked is not None and asked.link is link and asked.plan_id == received.plan_id
            if asked is not None and is_new:
                is_new, asked.loaded = not asked.loaded, True
        if is_new:
            _log.warning("standby: %s has loaded layers %s", link.peer, self._layers(link.peer, link))

    def report(self, here: Mapping[str, tuple[Link, Hello]], members: set[str]) -> list[StandbyStatus]:
        """Return the standbys of ``here``, without ``members``, which have a stage."""
        names = sorted(name for name, (_, hello) in here.items() if hello.standby and name not in members)
        return [StandbyStatus(name, self._layers(name, here[name][0])) for name in names]

    def _layers(self, name: str, link: Link) -> str | None:
        with self._lock:
            asked = self._preloads.get(name)
        if asked is None or asked.link is not link or asked.plan is None or not asked.loaded:
            return None
        stage = next(stage for stage in asked.plan.stages if name in stage.holders)
        return f"{stage.start}-{stage.end - 1}"


def _bytes_on(hello: Hello, active: ActivePlan, largest: str) -> int:
    """Return the bytes of the weights of ``largest`` on a standby, which may hold them in another form."""
    found = active.weight_bytes[largest]
    if not hello.unpacks:
        return found
    position, stage = next((i, one) for i, one in enumerate(active.plan.stages) if largest in one.holders)
    form = held_form(active.plan.kernel_of(position), unpacks=True)
    span = Span(stage.start, stage.end, stage.output)
    return max(found, rank_bytes(active.placement.spec, span, form, stage.world_size))
