"""Make every member fetch its part of a model that does not run, while another one does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from convoy.cluster.head.planning import Planner
from convoy.cluster.head.prefetch import HeadPrefetch, MemberProgress
from convoy.cluster.options import MemberOptions
from convoy.cluster.weights.head_server import HeadWeightServer
from convoy.errors import LinkClosed, ModelError, PeerError
from convoy.model.checkpoints.source import ModelSource
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Hello, Plan
from convoy.wire.messages.fetch import SUPERSEDED, Fetch

_AGAIN_S = 1.0


class WeightPull:
    """Pull one model at a time. Receiver threads call `handle_fetch`."""

    def __init__(
        self,
        options: MemberOptions,
        prefetch: HeadPrefetch,
        planner: Callable[[ModelSource, HeadWeightServer], Planner],
        hellos: Callable[[ModelSource], Mapping[str, Hello]],
    ) -> None:
        """Prepare to pull. ``hellos`` returns the members' offers for a model, and ``planner`` plans it."""
        self._planner = planner
        self._hellos = hellos
        self._options = options
        self._prefetch = prefetch
        # Serves the model that is pulled.
        self._weights: HeadWeightServer | None = None

    def handle_fetch(self, running: HeadWeightServer, link: Link, fetch: Fetch) -> None:
        """Answer a question for a piece of the model that is pulled, or else of the one that runs."""
        pulled = self._weights
        if pulled is not None and fetch.manifest == pulled.manifest().digest:
            pulled.handle_fetch(link, fetch)
        else:
            running.handle_fetch(link, fetch)

    def run(self, source: ModelSource, watch: Callable[[], None], tell: MemberProgress) -> set[str]:
        """Let each peer fetch what its stage of a first plan of a model needs. Return those that have it.

        A plan that is to run comes first. A member that is lost leaves its part to the others. Raises
        `PlanError` if the model does not fit, ModelError with the words of each member that cannot have its
        part, and the errors of ``watch``.
        """
        weights = HeadWeightServer(source, self._options)

        def hashed(done: int, total: int) -> None:
            watch()
            tell(self._prefetch.me, done, total)

        try:
            weights.manifest(hashed)
            self._weights, planner = weights, self._planner(source, weights)
            return self._fetch(source, planner, watch, tell)
        finally:
            self._weights = None
            weights.close()

    def _fetch(
        self, source: ModelSource, planner: Planner, watch: Callable[[], None], tell: MemberProgress
    ) -> set[str]:
        prefetch, peers, names = self._prefetch, self._prefetch.peers, set[str]()

        def plan() -> Plan:
            found = planner.first(self._hellos(source)).plan
            names.clear()
            names.update(prefetch.names(found))
            return found

        while True:
            try:
                errors = prefetch.fetch(plan, watch, tell)
            except PeerError:
                # Another plan leaves out a member that went before it was asked.
                if names <= peers.present().keys():
                    raise
            else:
                if not errors:
                    return names
                if SUPERSEDED not in errors.values() and errors.keys() <= peers.present().keys():
                    said = "; ".join(f"{name}: {why}" for name, why in sorted(errors.items()))
                    public = f"not every member has its part of {source.name}: {', '.join(sorted(errors))}"
                    raise ModelError(
                        f"not every member has its part of {source.name}: {said}",
                        public=f"{public}; the head's log has the reason",
                    )
            if peers.closed_within(_AGAIN_S):
                raise LinkClosed("the head is shutting down")
