"""The handshake's real code under an attacker that owns the network.

Every routing of the messages of two sessions, and of their parts, is tried, among members and one bad
one. Bounded: two sessions at a time, each message delivered once to each place where one is expected,
whole or with one part of it taken from the other session. In all of them a session that gets secrets
shares them with the member it named, under the same claims, and each session of one end with at most one
of the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from adversary.units import message_1_fields, message_2_fields, message_3_fields
from convoy.crypto.cipher import Cipher
from convoy.crypto.handshake import HandshakeContext, Initiator, Party, Responder, Secrets
from convoy.errors import ConvoyError

BOTH = (Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)
KEYS = {name: Ed25519PrivateKey.generate() for name in ("alpha", "beta", "gamma")}
PARTIES = {
    name: Party(name, key.public_key().public_bytes_raw(), name.encode().ljust(32, b"."))
    for name, key in KEYS.items()
}
FIELDS = {1: message_1_fields("alpha", "beta", "model"), 2: message_2_fields(), 3: message_3_fields()}


def context(
    initiator: str, responder: str, link: int, *, epoch: int = 5, replaces: int = 0
) -> HandshakeContext:
    return HandshakeContext(
        PARTIES[initiator],
        PARTIES[responder],
        bytes([link]) * 16,
        "model",
        epoch,
        bytes([epoch]) * 32,
        replaces=bytes([replaces]) * 16,
    )


@dataclass
class Session:
    """Hold both ends of an intended handshake, run by honest code. The attacker signs for gamma."""

    dialler: HandshakeContext
    listener: HandshakeContext
    ciphers: tuple[Cipher, ...] = BOTH

    def __post_init__(self) -> None:
        self.initiator = Initiator(self.dialler, KEYS[self.dialler.initiator.name].sign, self.ciphers)
        self.responder = Responder(self.listener, KEYS[self.listener.responder.name].sign, self.ciphers)
        self.sent: dict[int, bytes] = {1: self.initiator.create_1()}
        self.secrets: dict[str, Secrets] = {}

    def deliver(self, number: int, message: bytes) -> None:
        """Deliver message 1 or 3 to the responder, 2 to the initiator; a refusal is an end, not a failure."""
        try:
            if number == 1:
                self.responder.consume_1(message)
                self.sent[2] = self.responder.create_2()
            elif number == 2:
                self.initiator.consume_2(message)
                self.sent[3], self.secrets["dialler"] = self.initiator.create_3()
            else:
                self.secrets["listener"] = self.responder.consume_3(message)
        except ConvoyError:
            return


def agreed(sessions: list[Session]) -> None:
    """Check that every end with secrets has one counterpart at most, and that both name each other alike."""
    ends = [
        (end, session.dialler if end == "dialler" else session.listener, secrets)
        for session in sessions
        for end, secrets in session.secrets.items()
    ]
    for end, about, secrets in ends:
        others = [
            (other_about, other)
            for other_end, other_about, other in ends
            if other_end != end and bytes(other.binding) == bytes(secrets.binding)
        ]
        assert len(others) <= 1
        same_end = [s for e, _, s in ends if e == end and bytes(s.binding) == bytes(secrets.binding)]
        assert len(same_end) == 1, "two sessions of one end have one secret"
        if end == "listener":
            assert others, "a listener has secrets that no dialler has"
        for other_about, other in others:
            claims = (about.initiator, about.responder, about.link_id, about.cluster_id, about.version)
            assert claims == (
                other_about.initiator,
                other_about.responder,
                other_about.link_id,
                other_about.cluster_id,
                other_about.version,
            )
            assert bytes(secrets.send) == bytes(other.receive)
            assert bytes(secrets.receive) == bytes(other.send)
            assert (secrets.cipher, secrets.replaces) == (other.cipher, other.replaces)
            assert (secrets.peer_epoch, other.peer_epoch) == (other_about.roster_epoch, about.roster_epoch)


# Pairs of sessions that could be mistaken for each other: (dialler's view, listener's view) twice.
AB = ("alpha", "beta")
BA = ("beta", "alpha")
PAIRS: dict[str, tuple[HandshakeContext, HandshakeContext, HandshakeContext, HandshakeContext]] = {
    "two links of one pair": (context(*AB, 1), context(*AB, 1), context(*AB, 2), context(*AB, 2)),
    "one link id twice": (context(*AB, 1), context(*AB, 1), context(*AB, 1), context(*AB, 1)),
    "both dial each other": (context(*AB, 1), context(*AB, 1), context(*BA, 1), context(*BA, 1)),
    "through the bad member": (
        context("alpha", "gamma", 1),
        context("alpha", "gamma", 1),
        context("gamma", "beta", 1),
        context("gamma", "beta", 1),
    ),
    "the bad member in a name's place": (
        context(*AB, 1),
        context("gamma", "beta", 1),
        context("alpha", "gamma", 1),
        context(*AB, 1),
    ),
    "two epochs": (
        context(*AB, 1),
        context(*AB, 1, epoch=6),
        context(*AB, 1, epoch=6),
        context(*AB, 1),
    ),
    "two links that replace": (
        context(*AB, 1, replaces=9),
        context(*AB, 1),
        context(*AB, 2, replaces=8),
        context(*AB, 2),
    ),
    "two links that replace, of one id": (
        context(*AB, 1, replaces=9),
        context(*AB, 1),
        context(*AB, 1, replaces=8),
        context(*AB, 1),
    ),
}


def two(pair: str) -> list[Session]:
    a, b, c, d = PAIRS[pair]
    return [Session(a, b), Session(c, d)]


def routes() -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield, for each of the three messages, the sessions' targets: straight, crossed, doubled."""
    return itertools.product(itertools.product((0, 1), repeat=2), repeat=3)


@pytest.mark.parametrize("pair", PAIRS)
def test_no_routing_of_two_sessions_messages_breaks_agreement(pair: str) -> None:
    num_agreed = 0
    for route in routes():
        sessions = two(pair)
        for number, sources in enumerate(route, start=1):
            said = [dict(session.sent) for session in sessions]
            for session, source in zip(sessions, sources, strict=True):
                if number in said[source]:
                    session.deliver(number, said[source][number])
        agreed(sessions)
        num_agreed += any(len(session.secrets) == 2 for session in sessions)
    assert num_agreed or pair == "the bad member in a name's place", (
        "the model explores nothing that succeeds"
    )


@pytest.mark.parametrize(
    "pair", ["two links of one pair", "one link id twice", "two links that replace, of one id"]
)
@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_part_of_another_sessions_message_passes_for_ones_own(pair: str, number: int) -> None:
    for field, (start, end) in FIELDS[number].items():
        sessions = two(pair)
        for step in (1, 2, 3):
            said = [dict(session.sent) for session in sessions]
            for index, session in enumerate(sessions):
                if step not in said[index]:
                    continue
                message = said[index][step]
                theirs = said[1 - index].get(step)
                if step == number and theirs is not None:
                    spliced = message[:start] + theirs[start:end] + message[end:]
                    changed = spliced != message
                    message = spliced
                    session.deliver(step, message)
                    if changed and number == 3:
                        assert "listener" not in session.secrets, field
                    continue
                session.deliver(step, message)
        agreed(sessions)
        if number < 3:
            for session in sessions:
                both = [bytes(secrets.binding) for secrets in session.secrets.values()]
                assert len(set(both)) <= 1, field


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_message_of_one_kind_passes_for_another(number: int) -> None:
    for other in (1, 2, 3):
        if other == number:
            continue
        sessions = two("two links of one pair")
        recorded = sessions[1]
        for step in (1, 2, 3):
            recorded.deliver(step, recorded.sent[step])
        victim = sessions[0]
        for step in range(1, number):
            victim.deliver(step, victim.sent[step])
        victim.deliver(number, recorded.sent[other])
        agreed(sessions)
        assert not (number == 2 and "dialler" in victim.secrets)
        assert not (number == 3 and "listener" in victim.secrets)


@pytest.mark.parametrize(
    ("listener", "offered"),
    [
        (replace(context(*AB, 1), version=2), BOTH),
        (context(*AB, 2), BOTH),
        (replace(context(*AB, 1), cluster_id="other"), BOTH),
        (replace(context(*AB, 1), responder=PARTIES["gamma"]), BOTH),
        (replace(context(*AB, 1), initiator=PARTIES["gamma"]), BOTH),
        (replace(context(*AB, 1), roster_digest=bytes(32)), BOTH),
        (
            replace(
                context(*AB, 1),
                initiator=replace(PARTIES["alpha"], certificate_fingerprint=bytes(32)),
            ),
            BOTH,
        ),
        (
            replace(
                context(*AB, 1),
                initiator=replace(PARTIES["alpha"], identity_key=PARTIES["gamma"].identity_key),
            ),
            BOTH,
        ),
    ],
)
def test_ends_that_know_different_things_never_both_have_secrets(
    listener: HandshakeContext, offered: tuple[Cipher, ...]
) -> None:
    session = Session(context(*AB, 1), listener, offered)
    for number in (1, 2, 3):
        if number in session.sent:
            session.deliver(number, session.sent[number])
    assert "listener" not in session.secrets


def test_one_broken_exchange_of_keys_gives_no_traffic_keys() -> None:
    """The secret is extracted from both shared secrets: with either replaced, it is another."""
    from convoy.crypto import keys

    transcript, one, other = bytes(32), bytes([1]) * 32, bytes([2]) * 32
    honest = bytes(keys.extract(transcript, one, other))
    for changed in (
        keys.extract(transcript, bytes(32), other),
        keys.extract(transcript, one, bytes(32)),
        keys.extract(transcript, other, one),
    ):
        assert bytes(changed) != honest
