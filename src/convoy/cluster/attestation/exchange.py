"""Challenges and evidence on the links between a head and its peers, in both directions.

Neither is on the path of a token. Receiver threads only queue messages here. One thread makes evidence.
Another asks every watched member again at the policy's interval, and at once when the watched members
change.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from convoy.cluster.attestation.evidence_maker import EvidenceMaker, TpmHardware
from convoy.cluster.attestation.evidence_relay import EvidenceRelay
from convoy.cluster.attestation.tpm import Tpm
from convoy.cluster.options import MemberOptions
from convoy.errors import AttestationError, ConvoyError, RosterError
from convoy.transport.link.link import Link
from convoy.transport.log_limit import RateLimitedLog
from convoy.transport.member import LocalMember
from convoy.trust.evidence.evidence import NONCE_BYTES, Occasion
from convoy.trust.evidence.level import Level
from convoy.trust.evidence.policy import Policy
from convoy.trust.evidence.verdict import Verdict, no_evidence
from convoy.trust.evidence.verify import VerificationContext, appraise, asked_registers
from convoy.wire.messages.evidence import Challenge, Evidence

_log = logging.getLogger(__name__)

_LOOK_UP_S = 0.25
OnFall = Callable[[Link, Verdict], None]


@dataclass(slots=True)
class _Asked:
    """Hold a challenge that is under way."""

    challenge: Challenge
    binding: bytes = field(repr=False)
    done: threading.Event = field(default_factory=threading.Event)
    evidence: Evidence | None = None
    at_s: float = field(default_factory=time.monotonic)


class Attestation:
    """Run this member as attester and as verifier.

    ``on_fall`` is called for a watched link below the minimum.
    """

    def __init__(
        self,
        me: Callable[[], LocalMember],
        evidence_maker: EvidenceMaker,
        policy: Policy,
        on_fall: OnFall,
    ) -> None:
        self.policy = policy
        self.evidence_maker = evidence_maker
        self.relay = EvidenceRelay(me, evidence_maker)
        self._me = me
        self._on_fall = on_fall
        self._lock = threading.Lock()
        self._bindings: dict[Link, bytes] = {}
        self._limited_log = RateLimitedLog(_log)
        self._asked: dict[Link, _Asked] = {}
        # Challenges that were sent while the member held a stage of a plan that is over.
        self._owing: dict[Link, _Asked] = {}
        self._to_prove: dict[Link, Challenge] = {}
        self._wake = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._started: set[str] = set()
        self._watched: tuple[Link, ...] = ()
        self._num_watches = 0
        self._watch_anew = threading.Condition(self._lock)
        self._hold_stages = False
        self.verdicts: dict[str, Verdict] = {}

    @classmethod
    def of(cls, me: Callable[[], LocalMember], options: MemberOptions, on_fall: OnFall) -> Attestation:
        """Return the attestation that this member's operator configured.

        Raises `AttestationError` if the TPM's name is malformed.
        """
        hardware = None if options.tpm is None else TpmHardware(Tpm(options.tpm))
        return cls(me, EvidenceMaker(hardware), options.policy, on_fall)

    @property
    def num_to_prove(self) -> int:
        """Return how many challenges of other members wait for this member's evidence."""
        return len(self._to_prove)

    @property
    def is_asking(self) -> bool:
        """Return whether a challenge of this member waits for its answer."""
        return bool(self._asked)

    # Owners and receiver threads.

    def attach(self, link: Link) -> None:
        """Register a link before it starts: evidence on it is bound to the handshake that it has now."""
        with self._lock:
            self._bindings[link] = link.binding

    def detach(self, link: Link) -> None:
        """Forget a link that ended, and end the waits for its evidence."""
        with self._lock:
            self._bindings.pop(link, None)
            self._to_prove.pop(link, None)
            asked = self._asked.pop(link, None)
        if asked is not None:
            asked.done.set()
        self.relay.detach(link)

    def handle_challenge(self, link: Link, challenge: Challenge) -> None:
        """Queue a challenge. Never blocks.

        It replaces an older one that was not begun, so that a verifier that asks too often makes no other
        work wait here.
        """
        with self._wake:
            self._to_prove[link] = challenge
            self._wake.notify()
        self._start("prove", self._prove_all)

    def handle_evidence(self, link: Link, evidence: Evidence) -> None:
        """Give evidence to the thread that waits for it. Never blocks."""
        with self._lock:
            asked = self._asked.pop(link, None)
        if asked is None:
            self._limited_log.warning("evidence", f"{link.peer} sent evidence without a challenge")
            return
        asked.evidence = evidence
        asked.done.set()

    def close(self) -> None:
        """End all threads."""
        self._closed.set()
        self.relay.close()
        with self._lock:
            self._wake.notify_all()
            self._watch_anew.notify_all()

    # Verifier.

    def check(
        self, links: Iterable[Link], *, holds_stage: bool = False, watch: Callable[[], None] | None = None
    ) -> dict[str, Verdict]:
        """Challenge all links at once, and return the verdict on each member within the policy's deadline.

        ``watch`` is called while waiting; an error that it raises ends the wait.
        """
        verdicts = self._check(links, holds_stage=holds_stage, watch=watch)
        self.verdicts.update(verdicts)
        return verdicts

    def _check(
        self, links: Iterable[Link], *, holds_stage: bool, watch: Callable[[], None] | None = None
    ) -> dict[str, Verdict]:
        asked = {link: self._ask(link) for link in links}
        deadline_s = time.monotonic() + self.policy.deadline_s
        verdicts = {}
        for link, one in asked.items():
            self._wait(one, deadline_s, watch)
            verdicts[link.peer] = self._judge(link, one, holds_stage=holds_stage)
        return verdicts

    def check_self(self) -> Verdict:
        """Return the verdict of this member on its own evidence."""
        me = self._me()
        binding = secrets.token_bytes(NONCE_BYTES)
        challenge = self._challenge(me.name)
        evidence = self.evidence_maker.prove(me, binding, challenge)
        verdict = self._appraise(me.name, _Asked(challenge, binding), evidence, holds_stage=False)
        self.verdicts[me.name] = verdict
        return verdict

    def suffices(self, verdict: Verdict) -> bool:
        return verdict.level >= self.policy.minimum

    def refusal(self, verdict: Verdict) -> AttestationError:
        """Return the error that tells a member why it gets no stage."""
        return AttestationError(
            f"{verdict.member} has level {verdict.level.text}, and the policy's minimum is "
            f"{self.policy.minimum.text}: {verdict.why}",
            hint="`convoy attest show` on that member prints its evidence",
        )

    def watch(self, links: Iterable[Link], *, hold_stages: bool) -> None:
        """Ask these links from now on at the policy's interval; with a minimum, at once as well.

        Earlier challenges no longer count: they may have been answered while no plan ran.
        """
        with self._lock:
            if self._hold_stages:
                self._owing = {link: self._asked[link] for link in self._watched if link in self._asked}
            self._watched = tuple(links)
            self._hold_stages = hold_stages
            self._num_watches += 1
            self._watch_anew.notify_all()
        self._start("watch", self._watch_all)

    def settle(self, watch: Callable[[], None]) -> None:
        """Wait, between two plans, for answers to the last plan's challenges, until their own deadline.

        Otherwise a member that fails a step whenever its answer is due would never have to answer.
        ``watch`` is as for `check`. A member below the minimum falls.
        """
        with self._lock:
            owing, self._owing = self._owing, {}
        for link, asked in owing.items():
            if not self.policy.minimum or link not in self._bindings:
                continue
            self._wait(asked, asked.at_s + self.policy.deadline_s, watch)
            verdict = self._judge(link, asked, holds_stage=False)
            if link in self._bindings and not self.suffices(verdict):
                self.verdicts[link.peer] = verdict
                self._on_fall(link, verdict)

    def _wait(self, asked: _Asked, deadline_s: float, watch: Callable[[], None] | None) -> None:
        while not asked.done.wait(min(_LOOK_UP_S, max(0.0, deadline_s - time.monotonic()))):
            if watch is not None:
                watch()
            if time.monotonic() >= deadline_s or self._closed.is_set():
                return

    def _ask(self, link: Link) -> _Asked:
        with self._lock:
            binding = self._bindings.get(link, b"")
            asked = self._asked[link] = _Asked(self._challenge(link.peer), binding)
        try:
            # If the link has no room, the challenge is not sent and its deadline passes.
            link.post(asked.challenge)
        except ConvoyError:
            asked.done.set()
        return asked

    def _challenge(self, member: str) -> Challenge:
        return Challenge(secrets.token_bytes(NONCE_BYTES), asked_registers(self.policy, member))

    def _judge(self, link: Link, asked: _Asked, *, holds_stage: bool) -> Verdict:
        with self._lock:
            if self._asked.get(link) is asked:
                del self._asked[link]
        if asked.evidence is None:
            ended = link not in self._bindings
            late = f"{link.peer} sent no evidence within {self.policy.deadline_s:g} s"
            return no_evidence(link.peer, f"the link to {link.peer} ended" if ended else late)
        return self._appraise(link.peer, asked, asked.evidence, holds_stage=holds_stage)

    def _appraise(self, name: str, asked: _Asked, evidence: Evidence, *, holds_stage: bool) -> Verdict:
        try:
            member = self._me().roster.member(name)
        # A newer roster may have removed the member meanwhile.
        except RosterError as error:
            return no_evidence(name, error.message)
        context = VerificationContext(
            member=name,
            attestation_key=member.attestation_key,
            occasion=Occasion(asked.binding, asked.challenge.nonce, member.identity_key),
            registers=asked.challenge.pcrs,
            own=self.evidence_maker.claims,
            holds_stage=holds_stage,
        )
        return appraise(evidence, self.policy, context)

    # Threads of their own.

    def _start(self, name: str, run: Callable[[], None]) -> None:
        with self._lock:
            if name in self._started:
                return
            self._started.add(name)
        threading.Thread(target=run, name=f"attestation {name}", daemon=True).start()

    def _prove_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._to_prove or self._closed.is_set())
                if self._closed.is_set():
                    return
                link = next(iter(self._to_prove))
                challenge = self._to_prove.pop(link)
                binding = self._bindings.get(link)
            if binding is None:
                continue
            try:
                evidence = self.evidence_maker.prove(self._me(), binding, challenge)
                # Post without waiting: a member that asks and reads nothing must not block the others.
                if not link.post(evidence):
                    self._limited_log.warning("no room", f"{link.peer} asks for evidence and takes none")
            except ConvoyError as error:
                _log.warning("no evidence for %s: %s", link.peer, error.message)

    def _watch_all(self) -> None:
        # The newest watch that was checked.
        checked = 0
        while True:
            with self._watch_anew:
                self._watch_anew.wait_for(partial(self._is_due, checked), self.policy.interval_s)
                if self._closed.is_set():
                    return
                checked, hold_stages = self._num_watches, self._hold_stages
                links = [link for link in self._watched if link in self._bindings]
            verdicts = self._check(links, holds_stage=hold_stages)
            for link in self._fallen(links, verdicts, checked):
                if link in self._bindings:
                    self._on_fall(link, verdicts[link.peer])

    def _is_due(self, checked: int) -> bool:
        """Return whether to ask before the interval is over. The caller holds the lock."""
        is_new = bool(self._watched) and self._num_watches != checked
        return self._closed.is_set() or (is_new and self.policy.minimum > Level.NONE)

    def _fallen(self, links: list[Link], verdicts: dict[str, Verdict], checked: int) -> list[Link]:
        """Store the verdicts that still count, and return the links below the minimum.

        They count even if a plan ends right after this.
        """
        with self._lock:
            if self._closed.is_set() or self._num_watches != checked:
                return []
            here = [link for link in links if link in self._bindings]
            self.verdicts.update({link.peer: verdicts[link.peer] for link in here})
        return [link for link in here if not self.suffices(verdicts[link.peer])]
