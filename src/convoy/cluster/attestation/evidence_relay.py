"""Evidence of members for a provider: a head asks its peers, and passes their answers on unchanged.

A peer binds its evidence to the identity key of the head that asks, as its own roster lists it. So no
other member can show it as evidence of a member of theirs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from convoy.cluster.attestation.evidence_maker import EvidenceMaker
from convoy.errors import ConvoyError
from convoy.transport.link.link import Link
from convoy.transport.log_limit import RateLimitedLog
from convoy.transport.member import LocalMember
from convoy.trust.evidence.evidence import provider_binding
from convoy.wire.messages.evidence import Challenge, Vouch, Vouched

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Asked:
    purpose: bytes
    done: threading.Event = field(default_factory=threading.Event)
    answer: Vouched | None = None


class EvidenceRelay:
    """Ask for evidence and answer with it. The messages' rows fix which of both a link allows."""

    def __init__(self, me: Callable[[], LocalMember], evidence_maker: EvidenceMaker) -> None:
        self._me = me
        self._evidence_maker = evidence_maker
        self._limited_log = RateLimitedLog(_log)
        self._wake = threading.Condition()
        self._asked: dict[Link, _Asked] = {}
        self._to_answer: dict[Link, Vouch] = {}
        self._gathering = threading.Lock()
        self._started = self._closed = False

    # Receiver threads.

    def handle_vouch(self, link: Link, vouch: Vouch) -> None:
        """Queue a question for evidence. Never blocks. Of two questions on a link the newer is answered."""
        with self._wake:
            self._to_answer[link] = vouch
            self._start()
            self._wake.notify_all()

    def handle_vouched(self, link: Link, vouched: Vouched) -> None:
        """Give an answer to the thread that waits for it. Never blocks."""
        with self._wake:
            asked = self._asked.get(link)
        if asked is None or asked.purpose != vouched.purpose:
            self._limited_log.warning("vouched", f"{link.peer} sent evidence without a question")
            return
        asked.answer = vouched
        asked.done.set()

    def detach(self, link: Link) -> None:
        """End the wait for a link that ended."""
        with self._wake:
            self._to_answer.pop(link, None)
            asked = self._asked.pop(link, None)
        if asked is not None:
            asked.done.set()

    def close(self) -> None:
        """End the thread, and all waits."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
            for asked in self._asked.values():
                asked.done.set()

    # The head.

    def own(self, purpose: bytes, registers: Sequence[int]) -> Vouched:
        """Return this member's own evidence, bound to its own key as the provider."""
        me = self._me()
        return self._prove(me, me.identity.public_key, Vouch(purpose, list(registers)))

    def gather(
        self, links: Iterable[Link], purpose: bytes, registers: Sequence[int], deadline_s: float
    ) -> dict[str, Vouched]:
        """Return the evidence that comes within ``deadline_s`` seconds, by member.

        Other calls wait until this ends.
        """
        with self._gathering:
            asked = {link: self._ask(link, Vouch(purpose, list(registers))) for link in links}
            end_s = time.monotonic() + deadline_s
            for one in asked.values():
                one.done.wait(max(0.0, end_s - time.monotonic()))
            with self._wake:
                for link, one in asked.items():
                    if self._asked.get(link) is one:
                        del self._asked[link]
        return {link.peer: one.answer for link, one in asked.items() if one.answer is not None}

    def _ask(self, link: Link, vouch: Vouch) -> _Asked:
        asked = _Asked(vouch.purpose)
        with self._wake:
            self._asked[link] = asked
        try:
            link.post(vouch)
        except ConvoyError:
            asked.done.set()
        return asked

    # The peer.

    def _start(self) -> None:
        """Start the answering thread once. The caller holds the lock."""
        if not self._started:
            self._started = True
            threading.Thread(target=self._answer_all, name="evidence relay", daemon=True).start()

    def _answer_all(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._to_answer or self._closed)
                if self._closed:
                    return
                link, vouch = self._to_answer.popitem()
            try:
                me = self._me()
                answer = self._prove(me, me.roster.member(link.peer).identity_key, vouch)
                if not link.post(answer):
                    self._limited_log.warning("no room", f"{link.peer} asks for evidence and takes none")
            except ConvoyError as error:
                _log.warning("no evidence for %s: %s", link.peer, error.message)

    def _prove(self, me: LocalMember, provider: bytes, vouch: Vouch) -> Vouched:
        challenge = Challenge(vouch.purpose, vouch.pcrs)
        return Vouched.of(
            vouch.purpose, self._evidence_maker.prove(me, provider_binding(provider), challenge)
        )
