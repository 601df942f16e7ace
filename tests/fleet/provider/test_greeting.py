"""Coordinators that are not the pinned one, or are reached through somebody else."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from websockets.sync.server import ServerConnection, serve

from convoy.crypto.identity import Identity
from convoy.errors import ConfigError
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.proof import CoordinatorProof, PublicCertificate
from convoy.fleet.provider.greeting import CoordinatorUnproved
from convoy.wire.fleet.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    FleetMessage,
    FromProvider,
    ProviderChallenge,
    ProviderHello,
    decode_from_provider,
    encode_fleet,
)
from support.fleet import FleetUnderTest
from support.tls import TestAuthority, TlsRelay

OPTIONS = CoordinatorOptions(instance="test")
NOWHERE = "http://127.0.0.1:1"  # the engine of a provider that is asked nothing
PINNED = Identity.generate()


@pytest.fixture
def authority(tmp_path: Path) -> TestAuthority:
    return TestAuthority(tmp_path)


@contextmanager
def fleet_of(folder: Path, **changes: object) -> Iterator[FleetUnderTest]:
    fleet = FleetUnderTest(folder, OPTIONS, **changes)  # type: ignore[arg-type]
    try:
        yield fleet
    finally:
        fleet.close()


def refusal_of(fleet: FleetUnderTest, dial: str, authority: TestAuthority) -> CoordinatorUnproved:
    """Return why a provider that pins the coordinator ends when it dials there."""
    fleet.add(
        *("relayed", NOWHERE),
        approved=False,
        dial=dial,
        tls=authority.trusting,
        coordinator_key=fleet.identity.public_key,
    )
    error = fleet.error_of(-1)
    assert isinstance(error, CoordinatorUnproved), error
    return error


def test_a_pinned_provider_registers_over_the_coordinators_own_tls(
    tmp_path: Path, authority: TestAuthority
) -> None:
    with fleet_of(tmp_path, tls=authority.issue("own")) as fleet:
        key = fleet.identity.public_key
        fleet.add("direct", NOWHERE, tls=authority.trusting, coordinator_key=key)
        assert fleet.events == ["direct: registered as direct"]


def test_a_relay_with_another_certificate_is_refused_before_anything_else_is_sent(
    tmp_path: Path, authority: TestAuthority
) -> None:
    with fleet_of(tmp_path, tls=authority.issue("own")) as fleet:
        relay = TlsRelay(authority.issue("relay"), ("127.0.0.1", fleet.port), authority.trusting())
        error = refusal_of(fleet, f"wss://127.0.0.1:{relay.port}", authority)
        relay.close()
        assert "it is relayed" in error.message
        assert len(relay.sent) < 1000  # an HTTP upgrade and a hello: a registration has 1,300 bytes more
        assert fleet.identities[0] not in relay.sent


def test_behind_a_tls_proxy_a_pinned_provider_wants_the_public_certificate(
    tmp_path: Path, authority: TestAuthority
) -> None:
    first, second = authority.issue("first"), authority.issue("second")
    public = tmp_path / "public.pem"
    public.write_bytes(Path(first[0]).read_bytes())
    with fleet_of(tmp_path, public_certificate=public) as fleet:
        key, target = fleet.identity.public_key, ("127.0.0.1", fleet.port)
        proxy, renewed = TlsRelay(first, target, None), TlsRelay(second, target, None)
        dialled = {"tls": authority.trusting, "coordinator_key": key}
        fleet.add("one", NOWHERE, dial=f"wss://127.0.0.1:{proxy.port}", **dialled)  # type: ignore[arg-type]
        assert "it is relayed" in refusal_of(fleet, f"wss://127.0.0.1:{renewed.port}", authority).message
        replacement = tmp_path / "next.pem"
        replacement.write_bytes(Path(second[0]).read_bytes())
        os.replace(replacement, public)
        fleet.add("two", NOWHERE, dial=f"wss://127.0.0.1:{renewed.port}", **dialled)  # type: ignore[arg-type]
        proxy.close()
        renewed.close()


def test_behind_a_tls_proxy_without_its_certificate_a_pinned_provider_refuses(
    tmp_path: Path, authority: TestAuthority
) -> None:
    with fleet_of(tmp_path) as fleet:
        proxy = TlsRelay(authority.issue("proxy"), ("127.0.0.1", fleet.port), None)
        dial = f"wss://127.0.0.1:{proxy.port}"
        error = refusal_of(fleet, dial, authority)
        assert "does not know the TLS certificate" in error.message
        assert "--public-certificate" in (error.hint or "")
        fleet.add("not pinned", NOWHERE, dial=dial, tls=authority.trusting)
        proxy.close()


def test_in_clear_a_pinned_provider_says_that_the_address_alone_is_signed(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as fleet:
        fleet.add("clear", NOWHERE, coordinator_key=fleet.identity.public_key)
        assert "the coordinator signs its address alone" in fleet.events[0]


class Impostor:
    """Answer a hello with the result of ``answer``, and keep all later messages."""

    def __init__(self, answer: Callable[[ProviderHello], FleetMessage]) -> None:
        self._answer = answer
        self.heard: list[FromProvider] = []
        self.hellos: list[ProviderHello] = []

    def __call__(self, socket: ServerConnection) -> None:
        data = socket.recv(timeout=60)
        assert isinstance(data, bytes)
        hello = decode_from_provider(data, MAX_MESSAGE_BYTES)
        assert isinstance(hello, ProviderHello)
        self.hellos.append(hello)
        socket.send(encode_fleet(self._answer(hello)))
        for data in socket:
            assert isinstance(data, bytes)
            self.heard.append(decode_from_provider(data, MAX_MESSAGE_BYTES))


replace = msgspec.structs.replace
HONEST = CoordinatorProof(PINNED)
ANSWERS: dict[str, Callable[[ProviderHello], FleetMessage]] = {
    "an echo": lambda hello: hello,
    "its own nonce for a signature": lambda hello: ProviderChallenge(
        *(PROTOCOL, PINNED.public_key, hello.nonce, b"", hello.nonce * 2)
    ),
    "no signature": lambda _: ProviderChallenge(PROTOCOL, PINNED.public_key, bytes(32)),
    "another key": lambda hello: CoordinatorProof(Identity.generate()).challenge(hello, []),
    "a signature of another hello": lambda hello: HONEST.challenge(replace(hello, nonce=bytes(32)), []),
    "a signature of another address": lambda hello: HONEST.challenge(replace(hello, authority="o:443"), []),
    "another nonce than is signed": lambda hello: replace(HONEST.challenge(hello, []), nonce=bytes(32)),
    "a certificate where there is none": lambda hello: CoordinatorProof(PINNED, served=bytes(32)).challenge(
        hello, []
    ),
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_impostor_hears_no_more_than_a_hello(tmp_path: Path, answer: str) -> None:
    impostor = Impostor(ANSWERS[answer])
    with fleet_of(tmp_path) as fleet, serve(impostor, "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        dial = f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        fleet.add("fooled", NOWHERE, approved=False, dial=dial, coordinator_key=PINNED.public_key)
        if answer == "an echo":  # no message of a coordinator at all: the next try may find one
            fleet.wait_event("are not one of its messages")
        else:
            assert isinstance(fleet.error_of(-1), CoordinatorUnproved)
        assert impostor.hellos[0].pinned
        assert impostor.heard == []
        server.shutdown()


def test_a_coordinator_does_not_tell_its_key_to_a_provider_that_knows_it() -> None:
    proof = CoordinatorProof(PINNED)
    hello = ProviderHello(PROTOCOL, bytes(32), "127.0.0.1:1", tls=False, pinned=True)
    assert PINNED.public_key not in encode_fleet(proof.challenge(hello, []))
    told = proof.challenge(msgspec.structs.replace(hello, pinned=False), [])
    assert told.coordinator == PINNED.public_key


def test_a_relay_in_between_does_not_end_a_provider_that_was_registered(
    tmp_path: Path, authority: TestAuthority
) -> None:
    own = authority.issue("own")
    with fleet_of(tmp_path, tls=own) as fleet:
        honest = TlsRelay(own, ("127.0.0.1", fleet.port), authority.trusting())  # the same certificate
        key = fleet.identity.public_key
        dial = f"wss://127.0.0.1:{honest.port}"
        fleet.add("steady", NOWHERE, dial=dial, tls=authority.trusting, coordinator_key=key)
        port = honest.port
        honest.close()
        relay = TlsRelay(authority.issue("relay"), ("127.0.0.1", fleet.port), authority.trusting(), port=port)
        fleet.wait_event("refused: the coordinator signed the certificate")
        relay.close()
        TlsRelay(own, ("127.0.0.1", fleet.port), authority.trusting(), port=port)
        fleet.wait_registered()


def test_a_public_certificate_that_goes_away_keeps_its_last_hash(
    tmp_path: Path, authority: TestAuthority
) -> None:
    file = tmp_path / "public.pem"
    with pytest.raises(ConfigError, match="cannot read"):
        PublicCertificate(file)
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="not a certificate"):
        PublicCertificate(file)
    file.write_bytes(Path(authority.issue("one")[0]).read_bytes())
    public = PublicCertificate(file)
    before = public.hash
    file.unlink()
    assert public.hash == before
