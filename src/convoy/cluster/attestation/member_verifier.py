"""The head's use of attestation: which members may have a stage, and which lose it while the cluster runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from convoy.cluster.attestation.exchange import Attestation
from convoy.cluster.options import MemberOptions
from convoy.cluster.status import VerdictStatus
from convoy.errors import AttestationError, ConvoyError, LinkClosed, PlanError, SpanError
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.verdict import Verdict
from convoy.wire.messages.control import Plan

_log = logging.getLogger(__name__)


class MemberVerifier:
    """Hold one head's verdicts on its members. ``excluded`` are those below the minimum, which get no stage.

    The head itself is judged like the others and shown, but keeps its stage: it is the judge, and the
    policy is its owner's. Placement rules bind it all the same.
    """

    def __init__(self, me: Callable[[], LocalMember], options: MemberOptions) -> None:
        self.attestation = Attestation.of(me, options, self._refuse_member)
        self.excluded: dict[str, Verdict] = {}
        self._me = me
        self._fallen: dict[str, AttestationError] = {}

    def admit(self, links: dict[str, Link], watch: Callable[[], None]) -> None:
        """Ask every peer for evidence. A member below the minimum is told so and removed from ``links``."""
        self.attestation.check_self()
        for name in links:
            self.excluded.pop(name, None)
            self._fallen.pop(name, None)
        for name, verdict in self.attestation.check(list(links.values()), watch=watch).items():
            if not self.attestation.suffices(verdict):
                self.excluded[name] = verdict
                refusal = self.attestation.refusal(verdict).message
                _log.warning("%s", refusal)
                links.pop(name).dismiss(refusal)

    def level(self, member: str) -> Level:
        verdict = self.attestation.verdicts.get(member)
        return Level.NONE if verdict is None else verdict.level

    def in_use(self) -> list[Verdict]:
        """Return the newest verdict on each member that may have a stage, the head's own included."""
        return [one for name, one in dict(self.attestation.verdicts).items() if name not in self.excluded]

    def report(self) -> list[VerdictStatus]:
        """Return the newest verdict on each member, for people."""
        return [
            VerdictStatus(name, one.level.text, list(one.reasons), name in self.excluded)
            for name, one in sorted(dict(self.attestation.verdicts).items())
        ]

    def watch(self, links: dict[str, Link], plan: Plan) -> None:
        """Ask the members with a stage while this plan runs: at its interval, and now under a minimum."""
        self.attestation.evidence_maker.model = plan.manifest or plan.model_digest
        holders = [links[name] for stage in plan.stages for name in stage.holders if name in links]
        if holders:
            self.attestation.watch(holders, hold_stages=True)

    def pause(self) -> None:
        """Stop asking while no plan runs: no member then holds a stage to prove."""
        self.attestation.watch((), hold_stages=False)

    def settle(self, watch: Callable[[], None]) -> None:
        """Wait, before the next plan, for answers of members that held a stage. Without one they get none."""
        self.attestation.settle(watch)

    def lost(self, link: Link, error: ConvoyError) -> ConvoyError | None:
        """Return the error to report for a link that ended; None if no caller waits for that member."""
        self.attestation.detach(link)
        if link.peer in self.excluded:
            return None
        return self._fallen.get(link.peer, error) if isinstance(error, LinkClosed) else error

    @contextmanager
    def explain(self) -> Iterator[None]:
        """Add the reasons of excluded members to the error of planning, if no plan fits without them."""
        try:
            yield
        except (PlanError, SpanError) as error:
            if not self.excluded:
                raise
            reasons = "; ".join(
                self.attestation.refusal(verdict).message for verdict in dict(self.excluded).values()
            )
            raise PlanError(f"{error.message}; {reasons}", hint=error.hint) from error

    def _refuse_member(self, link: Link, verdict: Verdict) -> None:
        refusal = self.attestation.refusal(verdict)
        _log.warning("%s", refusal.message)
        self._fallen[link.peer] = refusal
        link.dismiss(refusal.message, revoke=True)
