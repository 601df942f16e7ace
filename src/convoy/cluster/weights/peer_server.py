"""The weight server of a peer: it serves its tensors to its head, for members that lack them.

It serves tensors alone, by digest, of the models of two plans of this head: the last one to run, and the
last one to prepare. The receiving member compares them with the manifest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from convoy.cluster.weights.part_index import PartLocation, check_listable, to_bits
from convoy.cluster.weights.request_queue import Answer, RequestQueue
from convoy.errors import ConvoyError, ModelError
from convoy.model.checkpoints.manifest import Manifest
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Message, Plan
from convoy.wire.messages.fetch import Fetch, Held, Holding, Piece

_MAX_REASON = 400

Look = Callable[[Link, Plan], tuple[Manifest, dict[str, PartLocation]]]


class PeerWeightServer:
    """Serve the tensors of a peer.

    ``look`` returns the manifest of a plan's model, and the place of each tensor that is here, by digest.
    """

    def __init__(self, look: Look) -> None:
        self.look = look
        self.answers = RequestQueue(self._begin)
        self._lock = threading.Lock()
        # The last plan to run and the last one to prepare, by link.
        self._plans: dict[Link, tuple[Plan | None, Plan | None]] = {}

    def handle_question(self, link: Link, question: Fetch | Holding) -> None:
        """Queue a question for tensors."""
        self.answers.ask(link, question)

    def note_plan(self, link: Link, plan: Plan) -> None:
        """Note a head's newest plan to run. The head may ask for its model while another is prepared."""
        with self._lock:
            self._plans[link] = plan, self._plans.get(link, (None, None))[1]

    def note_prepared(self, link: Link, plan: Plan) -> None:
        """Note a head's newest plan to prepare. The head may ask for its model, too."""
        with self._lock:
            self._plans[link] = self._plans.get(link, (None, None))[0], plan

    def ended(self, link: Link) -> None:
        with self._lock:
            self._plans.pop(link, None)

    def close(self) -> None:
        self.answers.close()

    def _begin(self, link: Link) -> Answer:
        # The result of the last look at each model.
        known: dict[str, tuple[Manifest, dict[str, PartLocation]]] = {}

        def find(manifest: str, *, anew: bool) -> tuple[Manifest, dict[str, PartLocation]]:
            with self._lock:
                plans = {plan.manifest: plan for plan in self._plans.get(link, ()) if plan is not None}
            if not manifest or manifest not in plans:
                raise ModelError(f"the model with the manifest {manifest[:12]} is not that of the plan here")
            for old in known.keys() - plans.keys():
                del known[old]
            if anew or manifest not in known:
                known[manifest] = self.look(link, plans[manifest])
            return known[manifest]

        def answer(question: Message) -> Message:
            match question:
                case Holding(manifest=manifest):
                    return held(manifest, lambda: find(manifest, anew=True))
                case Fetch() as fetch:
                    return _piece(fetch, lambda: find(fetch.manifest, anew=False)[1])
                case _:
                    raise AssertionError("nothing else is put in")

        return answer


def held(manifest: str, find: Callable[[], tuple[Manifest, dict[str, PartLocation]]]) -> Held:
    """Return the result of ``find`` as bits, or the reason why there are none."""
    try:
        listed, places = find()
        check_listable(listed)
    except ConvoyError as error:
        return Held(manifest, b"", error.message[:_MAX_REASON])
    here = (name for name, entry in listed.tensors.items() if entry.digest in places)
    return Held(manifest, to_bits(listed.tensors, here), "")


def _piece(fetch: Fetch, find: Callable[[], dict[str, PartLocation]]) -> Piece:
    try:
        place = find().get(fetch.part)
        if place is None:
            raise ModelError(f"no tensor with the digest {fetch.part[:12]} is here")
        data = place.read(fetch.start, fetch.num_bytes)
    except ConvoyError as error:
        return Piece(fetch.number, 0, b"", error.message[:_MAX_REASON])
    return Piece(fetch.number, place.num_bytes, data, "")
