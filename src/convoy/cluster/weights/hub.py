"""A member's own way to the hub that a plan names: its layers' tensors, without the head.

The plan names the commit. This member's operator says which hub to ask for it, and whether to ask any. A
hub is not trusted: each tensor is compared with the manifest of the plan.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from convoy.cluster.options import MemberOptions
from convoy.errors import HubUnreachable, Incompatible, ModelError
from convoy.model.checkpoints.hub.files import HubName
from convoy.model.checkpoints.hub.stream import RETRY_WAIT_S, HubCommit
from convoy.model.checkpoints.hub.weights import HubWeights
from convoy.model.checkpoints.store.parts import ModelPart, is_whole
from convoy.wire.messages.control import Plan

_log = logging.getLogger(__name__)


class FromHub:
    """Fetch tensors from a hub for one member, and keep the index of the last commit."""

    def __init__(self, me: str, options: MemberOptions) -> None:
        self._me = me
        self._options = options
        self._last: tuple[str, HubWeights] | None = None

    def get(
        self,
        plan: Plan,
        parts: Sequence[ModelPart],
        tell: Callable[[int, int], None],
        watch: Callable[[], None],
    ) -> list[ModelPart]:
        """Get ``parts``, which are tensors, from the commit that ``plan`` names, if it names one.

        Returns the parts that the head must send. Raises the errors of ``tell`` and ``watch``. If only a
        hub may be asked, raises ModelError and Incompatible for parts that the hub lacks.
        """
        asks = self._options.weights_from
        if asks == "head" or not parts:
            return list(parts)
        if not plan.hub or (plan.own_hub and self._options.hub is None):
            if asks == "hub":
                raise self._no_hub(plan)
            return list(parts)
        try:
            left = self._weights(plan.hub).fetch(parts, tell, watch)
        except ModelError as error:
            if asks == "hub":
                raise
            why = "cannot be reached" if isinstance(error, HubUnreachable) else "is of no use"
            _log.warning("the hub %s, and the head is asked: %s", why, error.message)
            return [part for part in parts if not is_whole(part)]
        return self._check(plan.hub, left)

    def _no_hub(self, plan: Plan) -> ModelError:
        alone = f"{self._me} gets weights from a hub alone"
        if plan.hub:
            return ModelError(
                f"{alone}, and its configuration has none but the public one, which is not the head's",
                hint="set hub in its [model] section, or start this member with --weights-from auto",
            )
        return ModelError(
            f"{alone}, and the plan names none",
            hint="start the head with org/name, or this member with --weights-from auto",
        )

    def _check(self, named: str, wrong: list[ModelPart]) -> list[ModelPart]:
        if not wrong:
            return []
        what = f"{named} lacks the bytes of {wrong[0].name} that the manifest lists"
        if self._options.weights_from == "hub":
            raise Incompatible(what, hint="the head's files were changed, or are of another commit")
        _log.warning("%s, and the head is asked for that and %d more", what, len(wrong) - 1)
        return wrong

    def _commit(self, repo: str, commit: str) -> HubCommit:
        options = self._options
        wait_s = RETRY_WAIT_S if options.hub_retry_s is None else options.hub_retry_s
        return HubCommit(repo, commit, options.hub, wait_s)

    def _weights(self, named: str) -> HubWeights:
        if self._last is None or self._last[0] != named:
            name = HubName.read(named)
            if name is None:
                raise ModelError(f"the plan names {named[:80]!r}, which is no commit of a hub")
            self._last = named, HubWeights(self._commit(name.repo, name.revision), name.file)
        return self._last[1]
