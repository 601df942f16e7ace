"""An open invitation on this machine, and newcomers that speak to it byte by byte."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from convoy.cluster.enrolment.inviter import Enrolment, Newcomer
from convoy.cluster.enrolment.newcomer import Enrolled, EnrolmentRequest, join_by_token
from convoy.crypto.certificate import certificate_fingerprint
from convoy.crypto.enrolment import (
    EnrolmentProof,
    OneTimeCertificate,
    Terms,
    commit,
    hello_mac,
    make_proof,
    transcript,
)
from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import ConvoyError, LinkBroken
from convoy.transport.admission import AdmissionLimits
from convoy.transport.listen.enrolment_listener import EnrolmentLimits
from convoy.transport.listen.enrolment_tls import (
    dial_pinned,
    listen_everywhere,
    one_time_context,
    receive_enrolment,
    send_enrolment,
)
from convoy.transport.member import Roster
from convoy.transport.streams.stream import Stream
from convoy.trust.consumption import Consumption
from convoy.trust.invite import Token
from convoy.trust.roster.card import member_of
from convoy.trust.roster.newcomer import roster_with, why_not
from convoy.trust.roster.roster import make_roster, sign_roster
from convoy.wire.messages.enrolment import (
    EnrolmentCard,
    EnrolmentType,
    Refusal,
    decode_refusal,
    encode_card,
    encode_proof,
)

# No rates: tests try often, from one address.
OPEN = AdmissionLimits(address_rate=1000, address_burst=1000, strangers_rate=1000, strangers_burst=1000)
LIMITS = EnrolmentLimits(admission=OPEN)

NOW = datetime.datetime.now(datetime.UTC)


@dataclass
class Invitation:
    """Hold one open `Enrolment` of a cluster with a head alone."""

    token: Token
    enrolment: Enrolment
    consumption: Consumption
    operator: OperatorKey
    roster: Roster

    def accept(self, newcomer: Newcomer) -> None:
        newcomer.accept(sign_roster(roster_with(self.roster, newcomer.card, NOW), self.operator))


@contextmanager
def invitation(
    directory: Path,
    *,
    limits: EnrolmentLimits | None = None,
    lifetime_s: int = 600,
    like: Token | None = None,
    before: tuple[tuple[str, int], ...] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Invitation]:
    """Open an invitation until the block ends.

    ``like``: use the record of that token, as after a restart. ``before``: addresses that stand before
    the right one.
    """
    operator = OperatorKey.generate()
    roster = make_roster("home", [member_of("alpha", Identity.generate(), ("127.0.0.1", 7), head=True)])
    certificate = OneTimeCertificate.generate()
    sock = listen_everywhere("127.0.0.1", 0)
    token = Token(
        "home",
        operator.public_key,
        certificate_fingerprint(certificate.certificate_der),
        (*before, ("127.0.0.1", sock.getsockname()[1])),
        int(time.time()) + lifetime_s,
        max(1, lifetime_s),
        os.urandom(16),
    )
    record = Consumption(directory / "invites", (like or token).id)
    enrolment = Enrolment(
        sock,
        certificate,
        token,
        consumption=record,
        judge=lambda card: why_not(roster, card, NOW),
        limits=limits,
        clock=clock,
    )
    try:
        yield Invitation(token, enrolment, record, operator, roster)
    finally:
        enrolment.close()


@dataclass
class Joining:
    """Run `join_by_token` on a thread of its own, and hold ``code`` and ``enrolled`` once they exist."""

    token: Token
    name: str = "beta"
    port: int = 7777
    identity: Identity = field(default_factory=Identity.generate)
    codes: list[str] = field(default_factory=list)
    enrolled: Enrolled | None = None
    error: ConvoyError | None = None

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            asked = EnrolmentRequest(self.name, None, self.port)
            self.enrolled = join_by_token(self.token, self.identity, asked, self.codes.append)
        except ConvoyError as error:
            self.error = error

    def end(self) -> Joining:
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self


class RawNewcomer:
    """Send frames of the test's choice as a newcomer."""

    def __init__(self, token: Token, *, name: str = "beta", secret: bytes | None = None) -> None:
        self.identity = Identity.generate()
        self.terms = Terms(secret or token.secret, token.invitation, token.fingerprint)
        card = EnrolmentCard(
            name, ("127.0.0.1", 7777), self.identity.public_key, self.identity.tls_certificate_der
        )
        self.card = encode_card(card)
        self.nonce = os.urandom(32)
        self.stream: Stream
        self.stream, _ = dial_pinned(token.addresses[0], token.fingerprint, time.monotonic() + 10)

    def say_hello(self) -> None:
        """Commit, with a MAC under this newcomer's secret."""
        self.commitment = commit(self.nonce, self.card)
        hello = self.commitment + hello_mac(self.terms, self.commitment)
        send_enrolment(self.stream, EnrolmentType.HELLO, hello)

    def hello(self) -> bytes:
        """Commit, and return the inviter's nonce."""
        self.say_hello()
        return self.challenge()

    def challenge(self) -> bytes:
        """Return the inviter's nonce."""
        kind, challenge = receive_enrolment(self.stream)
        assert kind is EnrolmentType.CHALLENGE
        return challenge

    def proof(self, challenge: bytes) -> EnrolmentProof:
        self.spoken = transcript(self.terms, self.commitment, challenge, self.nonce, self.card)
        return make_proof(self.terms, self.identity, self.nonce, self.spoken)

    def send(self, proof: EnrolmentProof) -> None:
        send_enrolment(self.stream, EnrolmentType.PROOF, encode_proof(proof, self.card))

    def refusal(self) -> Refusal:
        kind, body = receive_enrolment(self.stream)
        assert kind is EnrolmentType.REFUSED
        return decode_refusal(body)

    def hung_up(self) -> bool:
        """Return whether the listener closed the connection without an answer."""
        try:
            receive_enrolment(self.stream)
        except LinkBroken:
            return True
        return False

    def close(self) -> None:
        self.stream.close()


def elsewhere(token: Token, port: int) -> Token:
    """Return the same invitation with another port in its address."""
    return replace(token, addresses=(("127.0.0.1", port),))


def assert_still_good(offer: Invitation) -> None:
    """Check that no attempt used the invitation up: an honest newcomer gets in."""
    assert not offer.consumption.used
    joining = Joining(offer.token, name="honest")
    newcomer = offer.enrolment.wait()
    offer.accept(newcomer)
    assert joining.end().enrolled is not None


class Middle:
    """Listen as an attacker, with an own certificate, and hand TLS streams to ``play``."""

    def __init__(self) -> None:
        self.certificate = OneTimeCertificate.generate()
        self.fingerprint = certificate_fingerprint(self.certificate.certificate_der)
        self.context = one_time_context(self.certificate)
        self.server = socket.create_server(("127.0.0.1", 0))
        self.port = self.server.getsockname()[1]
        self.heard = b""
        self.ended = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        sock, _ = self.server.accept()
        try:
            with self.context.wrap_socket(sock, server_side=True) as secured:
                self.heard = secured.recv(4096)
        except OSError:
            pass
        self.ended.set()
