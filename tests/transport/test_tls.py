"""The outer layer alone: the connections that it admits, and the secrets that never leave the process."""

from __future__ import annotations

import datetime
import os
import queue
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from convoy.crypto.identity import Identity
from convoy.errors import (
    ConfigError,
    ConvoyError,
    FrameTooLong,
    HandshakeError,
    HandshakeLate,
    IdentityError,
    Incompatible,
    LinkBroken,
    PeerError,
    PeerUnreachable,
    RosterError,
)
from convoy.transport.dial import dial
from convoy.transport.link.establish import TO_DIALLER, TO_LISTENER, establish_initiator, send_opening
from convoy.transport.link.link import Link, LinkOptions
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember
from convoy.transport.network import TcpNetwork
from convoy.transport.ports import free_port
from convoy.transport.streams.stream import Stream
from convoy.transport.streams.tcp import TlsStream, client_context, server_context, start_tls_client
from convoy.wire.frame import encode_handshake
from convoy.wire.messages.control import FrameType, Row, Step
from support.link_parts import note_server_names, num_lone_halves, socket_of, streams_of
from support.links import WAIT_S, End, tls_link_pair
from support.members import make_local_members, membership_of, shifted, with_roster
from support.relay import Relay
from support.waiting import wait_until

pytestmark = pytest.mark.outside

STEP = Step(7, [], [], [Row(1, 0, 2, 1)], b"")


@pytest.fixture
def members(tmp_path: Path) -> tuple[LocalMember, ...]:
    return make_local_members(["alpha", "beta", "gamma"], tmp_path)


class ListeningMember:
    """Hold a listener and all its reports."""

    def __init__(self, me: LocalMember, options: LinkOptions | None = None) -> None:
        self.links: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self.refusals: queue.SimpleQueue[ConvoyError] = queue.SimpleQueue()
        self.listener = Listener(
            ("127.0.0.1", 0), membership_of(me), self.links.put, options=options, on_refused=self.refusals.put
        )
        self.address = self.listener.address

    def refusal(self) -> ConvoyError:
        return self.refusals.get(timeout=WAIT_S)


@contextmanager
def opened(me: LocalMember, options: LinkOptions | None = None) -> Iterator[ListeningMember]:
    server = ListeningMember(me, options)
    yield server
    server.listener.close()


def half(me: LocalMember, server: ListeningMember, direction: int, link_id: bytes) -> TlsStream:
    """Open one connection of a link by hand."""
    sock = socket.create_connection(server.address)
    deadline_s = time.monotonic() + WAIT_S
    stream = TlsStream(start_tls_client(sock, client_context(me), deadline_s), 60)
    stream.set_deadline(deadline_s)
    send_opening(stream, direction, link_id)
    return stream


def proved_halves(me: LocalMember, server: ListeningMember, num_halves: int) -> list[TlsStream]:
    """Open connections that hold their place: the listener has judged their certificate."""
    held = [half(me, server, TO_LISTENER, os.urandom(16)) for _ in range(num_halves)]
    while server.listener.admission.num_proved < num_halves:
        time.sleep(0.001)
    return held


def test_the_negotiated_version_is_tls_1_3_without_tickets(members: tuple[LocalMember, ...]) -> None:
    server, client = server_context(members[1]), client_context(members[0])
    for context in (server, client):
        assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert not context.check_hostname
        assert context.keylog_filename is None
        assert len(context.get_ca_certs()) == 3
    assert server.num_tickets == 0


def test_sslkeylogfile_has_no_effect(
    members: tuple[LocalMember, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keylog = tmp_path / "keys.log"
    monkeypatch.setenv("SSLKEYLOGFILE", str(keylog))
    mine, theirs = tls_link_pair(*members[:2])
    there = End(theirs).start()
    here = End(mine).start()
    here.link.send(STEP)
    there.next()
    here.link.close()
    assert not keylog.exists()
    # The same variable does work where it is honoured, so its silence above means something.
    assert ssl.create_default_context().keylog_filename == str(keylog)


def test_no_name_of_the_server_goes_out(members: tuple[LocalMember, ...]) -> None:
    seen: list[str | None] = []
    with opened(members[1]) as server:
        note_server_names(server.listener, seen.append)
        link = dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        link.close()
    assert [name for name in seen if name is not None] == []


def test_no_session_is_ever_resumed(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1]) as server:
        for _ in range(2):
            stream = half(members[0], server, TO_LISTENER, os.urandom(16))
            sock = socket_of(stream)
            assert not sock.session_reused
            assert sock.session is None or not sock.session.has_ticket
            stream.close()


def test_a_certificate_outside_the_roster_is_refused_at_both_ends(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    stranger = make_local_members(["alpha", "beta"], tmp_path / "strangers")[0]
    with opened(members[1]) as server:
        with pytest.raises(HandshakeError, match="certificate is not in the roster"):
            dial(server.address, me=membership_of(stranger), peer_name="beta", timeout_s=WAIT_S)
        assert isinstance(server.refusal(), HandshakeError)
        trusting = _with_anchor(stranger, members[1])
        with pytest.raises(PeerError):
            half(trusting, server, TO_LISTENER, b"l" * 16).recv_into(memoryview(bytearray(1)))
        refusal = server.refusal()
    assert isinstance(refusal, HandshakeError)
    assert "certificate is not in the roster" in refusal.message


def _with_anchor(stranger: LocalMember, known: LocalMember) -> LocalMember:
    """Return a stranger that knows the listener's certificate, so that only the listener can refuse."""
    listed = stranger.roster.member(stranger.name)
    roster = replace(stranger.roster, members=(listed, known.roster.member(known.name)))
    return with_roster(stranger, roster)


def test_a_client_without_a_certificate_is_refused(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1]) as server:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        with socket.create_connection(server.address) as raw, pytest.raises(ssl.SSLError):  # noqa: PT012
            sock = context.wrap_socket(raw)
            sock.sendall(b"hello")
            sock.recv(1)
        assert isinstance(server.refusal(), HandshakeError)


def test_an_older_tls_is_refused(members: tuple[LocalMember, ...]) -> None:
    context = client_context(members[0])
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
    with opened(members[1]) as server, socket.create_connection(server.address) as raw:
        with pytest.raises((ssl.SSLError, OSError)):
            context.wrap_socket(raw)
        assert isinstance(server.refusal(), HandshakeError)


def test_another_member_at_the_address_is_refused(members: tuple[LocalMember, ...]) -> None:
    with (
        opened(members[2]) as server,
        pytest.raises(HandshakeError, match=r"beta at .* shows the certificate of another member"),
    ):
        dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)


def test_a_member_cannot_link_with_itself(members: tuple[LocalMember, ...]) -> None:
    with opened(members[0]) as server:
        with pytest.raises(RosterError, match="with itself"):
            dial(server.address, me=membership_of(members[0]), peer_name="alpha", timeout_s=WAIT_S)
        half(members[0], server, TO_LISTENER, b"l" * 16)
        assert "our own certificate" in server.refusal().message


def test_connections_of_two_members_do_not_pair(members: tuple[LocalMember, ...]) -> None:
    options = LinkOptions(handshake_timeout_s=1.0)
    with opened(members[1], options) as server:
        streams = [
            half(members[0], server, TO_LISTENER, b"l" * 16),
            half(members[2], server, TO_DIALLER, b"l" * 16),
        ]
        errors = [server.refusal().message for _ in range(2)]
        assert sorted(error.split()[0] for error in errors) == ["alpha", "gamma"]
        assert all("the other never came" in error for error in errors)
        assert all(stream.recv_into(memoryview(bytearray(1))) == 0 for stream in streams)
        assert server.links.empty()


def test_connections_of_two_links_do_not_pair(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1], LinkOptions(handshake_timeout_s=1.0)) as server:
        streams = [
            half(members[0], server, TO_LISTENER, b"1" * 16),
            half(members[0], server, TO_DIALLER, b"2" * 16),
        ]
        assert all("the other never came" in server.refusal().message for _ in streams)
        assert server.links.empty()


def test_one_direction_opened_twice_is_refused(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1], LinkOptions(handshake_timeout_s=1.0)) as server:
        streams = [half(members[0], server, TO_LISTENER, b"l" * 16) for _ in range(2)]
        errors = sorted(server.refusal().message for _ in streams)
        assert "opened one direction of a link twice" in errors[0] + errors[1]


def test_another_protocol_version_is_named_at_both_ends_over_tls(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1]) as server:
        streams = tuple(half(members[0], server, d, b"l" * 16) for d in (TO_LISTENER, TO_DIALLER))
        peer = members[0].roster.member("beta")
        with pytest.raises(Incompatible, match="beta speaks protocol version 1, and this"):
            establish_initiator(
                members[0], peer, b"l" * 16, (streams[0], streams[1]), LinkOptions(), version=9
            )
        refusal = server.refusal()
    assert isinstance(refusal, Incompatible)
    assert refusal.message == "alpha speaks protocol version 9, and this member speaks version 1"


def test_a_stolen_tls_key_without_the_identity_key_gets_no_link(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    thief_directory = tmp_path / "thief"
    Identity.generate().save(thief_directory)
    for name in ("tls.key", "tls.crt"):
        (thief_directory / name).write_bytes((tmp_path / "alpha" / name).read_bytes())
    thief_identity = Identity.load(thief_directory)
    listed = replace(members[0].roster.member("alpha"), identity_key=thief_identity.public_key)
    roster = replace(members[0].roster, members=(listed, *members[0].roster.members[1:]))
    thief = LocalMember("alpha", thief_identity, roster)
    # It claims the digest of the true roster, because it knows that one too.
    with opened(members[1]) as server:
        streams = tuple(half(thief, server, d, b"l" * 16) for d in (TO_LISTENER, TO_DIALLER))
        object.__setattr__(thief, "roster", members[0].roster)
        with pytest.raises(PeerError):  # noqa: PT012 - the thief may believe in its link until it uses it
            link = establish_initiator(
                thief, members[0].roster.member("beta"), b"l" * 16, (streams[0], streams[1]), LinkOptions()
            )
            End(link).start().link.ping(WAIT_S)
        refusal = server.refusal()
    assert refusal.message == "the signature is not by the identity key of alpha"


@pytest.mark.parametrize("which", ["dialler", "listener"])
def test_an_expired_roster_links_nobody(members: tuple[LocalMember, ...], which: str) -> None:
    old = shifted(members[0].roster, -datetime.timedelta(days=31))
    alpha, beta = (with_roster(member, old) for member in members[:2])
    if which == "dialler":
        with pytest.raises(RosterError, match="the roster of test expired at"):
            dial(("127.0.0.1", 1), me=membership_of(alpha), peer_name="beta", timeout_s=WAIT_S)
        return
    with opened(beta) as server:
        with pytest.raises(PeerError):
            dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        refusal = server.refusal()
    assert isinstance(refusal, RosterError)
    assert "expired at" in refusal.message


def test_nobody_at_the_address_names_peer_and_address(members: tuple[LocalMember, ...]) -> None:
    port = free_port()
    with pytest.raises(PeerUnreachable, match=f"beta at 127.0.0.1:{port} could not be reached"):
        dial(("127.0.0.1", port), me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)


def test_a_silent_listener_is_given_up_in_time(members: tuple[LocalMember, ...]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as sock,
        pytest.raises(PeerUnreachable, match="did not answer in time"),
    ):
        dial(sock.getsockname(), me=membership_of(members[0]), peer_name="beta", timeout_s=0.3)


def test_a_port_in_use_is_a_config_error(members: tuple[LocalMember, ...]) -> None:
    with (
        opened(members[1]) as server,
        pytest.raises(ConfigError, match=r"^port \d+ on 127\.0\.0\.1 is taken$"),
    ):
        Listener(server.address, membership_of(members[1]), lambda _link: None)


def test_an_oversized_handshake_message_is_refused_before_memory_is_taken(
    members: tuple[LocalMember, ...],
) -> None:
    with opened(members[1]) as server:
        streams = [half(members[0], server, d, b"l" * 16) for d in (TO_LISTENER, TO_DIALLER)]
        frame = bytearray(encode_handshake(FrameType.HANDSHAKE_1, b""))
        frame[6:8] = b"\xff\xff"
        streams[0].send_all(frame)
        assert isinstance(server.refusal(), FrameTooLong)


def test_silent_connections_neither_block_nor_outlive_a_deadline(
    members: tuple[LocalMember, ...],
) -> None:
    with opened(members[1], LinkOptions(handshake_timeout_s=1.0)) as server:
        silent = [socket.create_connection(server.address) for _ in range(30)]
        link = dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        assert server.links.get(timeout=WAIT_S).peer == "alpha"
        link.close()
        for sock in silent:
            assert isinstance(server.refusal(), PeerUnreachable)
            sock.settimeout(WAIT_S)
            assert sock.recv(1) == b""
            sock.close()


def test_half_open_connections_are_bounded(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1], LinkOptions(handshake_timeout_s=2.0, max_half_open=4)) as server:
        held = proved_halves(members[0], server, 4)
        with pytest.raises(PeerUnreachable, match="hung up"):
            half(members[0], server, TO_LISTENER, os.urandom(16))
        for stream in held:
            stream.close()
        for _ in held:
            server.refusal()
        link = dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        link.close()


def test_a_half_open_connection_that_proved_nothing_gives_way(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1], LinkOptions(max_half_open=4)) as server:
        held = [socket.create_connection(server.address) for _ in range(4)]
        wait_until(lambda: server.listener.admission.num_half_open == 4)
        link = dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        held[0].settimeout(WAIT_S)
        assert held[0].recv(1) == b""
        link.close()
        for sock in held:
            sock.close()


@pytest.mark.parametrize("index", [0, 1])
def test_either_connections_end_ends_the_link(members: tuple[LocalMember, ...], index: int) -> None:
    relays: list[Relay] = []

    def through(address: tuple[str, int]) -> tuple[str, int]:
        relays.append(Relay(address))
        return relays[0].address

    mine, theirs = tls_link_pair(*members[:2], through=through)
    here, there = End(mine).start(), End(theirs).start()
    relays[0].cut(index)
    assert isinstance(here.error(), LinkBroken)
    assert isinstance(there.error(), LinkBroken)
    with pytest.raises(LinkBroken):
        here.link.send(STEP)
    relays[0].close()


def test_a_closed_listener_leaves_standing_links_alone(members: tuple[LocalMember, ...]) -> None:
    mine, theirs = tls_link_pair(*members[:2])
    here, there = End(mine).start(), End(theirs).start()
    here.link.send(STEP)
    there.next()
    here.link.close()


def test_ten_links_come_up_at_once(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1]) as server:
        links: queue.SimpleQueue[Link] = queue.SimpleQueue()

        def call() -> None:
            links.put(dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S))

        threads = [threading.Thread(target=call) for _ in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        for _ in range(10):
            links.get(timeout=WAIT_S).close()
            server.links.get(timeout=WAIT_S).close()


@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_listener_that_hangs_up_before_tls_may_be_tried_again(
    members: tuple[LocalMember, ...], how: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def hang_up() -> None:
            sock, _ = server.accept()
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        with pytest.raises(PeerUnreachable, match=r"beta at .* (hung up before|could not be reached)"):
            dial(server.getsockname(), me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        thread.join()


def test_a_full_listener_is_unreachable_and_not_a_failed_handshake(members: tuple[LocalMember, ...]) -> None:
    with opened(members[1], LinkOptions(max_half_open=2, handshake_timeout_s=1.0)) as server:
        held = proved_halves(members[0], server, 2)
        with pytest.raises(PeerUnreachable, match="hung up"):
            dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
        for stream in held:
            stream.close()
            server.refusal()
        dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S).close()


def test_a_dialler_whose_proof_is_refused_learns_it_by_name(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    thief = object.__new__(LocalMember)
    Identity.generate().save(tmp_path / "thief")
    for stolen_file in members[0].identity.tls_files:
        shutil.copy(stolen_file, tmp_path / "thief")
    stolen = Identity.load(tmp_path / "thief")
    for name, value in (("name", "alpha"), ("identity", stolen), ("roster", members[0].roster)):
        object.__setattr__(thief, name, value)
    with opened(members[1]) as server:
        end = End(dial(server.address, me=membership_of(thief), peer_name="beta", timeout_s=WAIT_S)).start()
        error = end.error()
        assert isinstance(error, HandshakeError)
        assert error.message == "beta refused the handshake"
        assert "identity key of alpha" in server.refusal().message


def test_a_cipher_with_a_short_tag_is_refused(members: tuple[LocalMember, ...], tmp_path: Path) -> None:
    config = tmp_path / "openssl.cnf"
    config.write_text(
        "openssl_conf = d\n[d]\nssl_conf = s\n[s]\nsystem_default = x\n[x]\n"
        "Ciphersuites = TLS_AES_128_CCM_8_SHA256\n"
    )
    ending = "from support.links import tls_link_pair; from support.members import make_local_members\n"
    script = (
        f"import pathlib; {ending}"
        "from convoy.errors import HandshakeError\n"
        "members = make_local_members(['alpha', 'beta'], pathlib.Path(__import__('sys').argv[1]))\n"
        "try:\n    tls_link_pair(*members)\n"
        "except HandshakeError as error:\n    print(error.message)\n"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "members")],
        env={
            "OPENSSL_CONF": str(config),
            "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root / "tests")]),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "TLS chose TLS_AES_128_CCM_8_SHA256, expected one of" in done.stdout


def test_a_key_that_vanished_after_the_start_is_an_identity_error(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    (tmp_path / "alpha" / "tls.key").unlink()
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(IdentityError, match=r"tls\.key"):
        dial(server.getsockname(), me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
    with pytest.raises(IdentityError, match=r"tls\.key"):
        Listener(("127.0.0.1", 0), membership_of(members[0]), lambda _link: None)


def test_a_roster_that_tls_cannot_load_is_a_roster_error(members: tuple[LocalMember, ...]) -> None:
    alpha, beta = (members[0].roster.member(name) for name in ("alpha", "beta"))
    broken = with_roster(
        members[0], replace(members[0].roster, members=(alpha, replace(beta, certificate_der=b"\x30\x01")))
    )
    with pytest.raises(RosterError, match="certificates cannot be loaded"):
        client_context(broken)


@pytest.mark.parametrize(
    "address", [("a" * 64, 7000), ("a..b", 7000), (".", 7000), ("h", 2**64), ("127.0.0.1", 70000)]
)
def test_an_impossible_address_is_an_error_with_a_name(
    members: tuple[LocalMember, ...], address: tuple[str, int]
) -> None:
    with pytest.raises(PeerUnreachable, match="could not be reached"):
        dial(address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S)
    with pytest.raises(ConfigError, match="cannot listen on"):
        Listener(address, membership_of(members[1]), lambda _link: None)


def test_the_time_of_a_dial_is_total_over_all_addresses_of_a_name(
    members: tuple[LocalMember, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    class Deaf(socket.socket):
        def connect(self, address: object) -> None:
            waited.append(self.gettimeout() or 0.0)
            time.sleep(waited[-1])
            raise TimeoutError

    places = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"192.0.2.{i}", 7000)) for i in range(1, 5)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_more: places)
    monkeypatch.setattr(socket, "socket", Deaf)
    with pytest.raises(PeerUnreachable, match="did not answer in time"):
        dial(("many.example", 7000), me=membership_of(members[0]), peer_name="beta", timeout_s=0.2)
    assert len(waited) == 4
    assert sum(waited) <= 0.21


def test_sockets_notice_a_silent_host(members: tuple[LocalMember, ...]) -> None:
    for link in tls_link_pair(*members[:2]):
        for stream in streams_of(link):
            assert socket_of(stream).getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            assert socket_of(stream).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert socket_of(stream).getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT) == 3
            stream.close()


def test_a_closed_listener_hands_over_no_link_whose_handshake_was_under_way(
    members: tuple[LocalMember, ...],
) -> None:
    with opened(members[1]) as server:
        streams = tuple(half(members[0], server, d, b"l" * 16) for d in (TO_LISTENER, TO_DIALLER))
        wait_until(
            lambda: server.listener.admission.num_half_open <= 1 and not num_lone_halves(server.listener)
        )
        server.listener.close()
        peer = members[0].roster.member("beta")
        link = establish_initiator(members[0], peer, b"l" * 16, (streams[0], streams[1]), LinkOptions())
        error = End(link).start().error()
        assert "no longer listening" in error.message
        assert server.links.empty()


def test_a_thread_that_cannot_start_costs_one_connection_and_no_more(
    members: tuple[LocalMember, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "handshake":
            raise RuntimeError("can't start new thread")
        start(thread)

    with opened(members[1], LinkOptions(max_half_open=2)) as server:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            for _ in range(3):
                with socket.create_connection(server.address) as sock:
                    sock.settimeout(WAIT_S)
                    assert sock.recv(1) == b""
        assert "can't start new thread" in caplog.text
        dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S).close()


def test_a_refusal_is_logged_with_where_it_came_from(
    members: tuple[LocalMember, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(members[1]) as server:
        with socket.create_connection(server.address) as sock:
            port = sock.getsockname()[1]
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            server.refusal()
        assert f"refused a connection from 127.0.0.1 port {port}: " in caplog.text


def test_the_second_connection_of_a_link_is_waited_for_as_long_as_the_page_says() -> None:
    assert LinkOptions().handshake_timeout_s == 5.0
    assert LinkOptions().max_half_open == 64


def test_a_connection_without_its_other_is_given_up_at_the_handshakes_deadline(
    members: tuple[LocalMember, ...],
) -> None:
    started_s = time.monotonic()
    with opened(members[1], LinkOptions(handshake_timeout_s=1.0)) as server:
        stream = half(members[0], server, TO_LISTENER, b"l" * 16)
        assert "the other never came" in server.refusal().message
        assert time.monotonic() - started_s > 0.9
        stream.close()


@pytest.mark.parametrize("fails", ["wrap", "sign"])
def test_a_dial_that_fails_by_a_bug_leaves_no_connection_open(
    members: tuple[LocalMember, ...], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Stream] = []

    def wrap(stream: Stream) -> Stream:
        made.append(stream)
        if fails == "wrap" and len(made) == 2:
            raise ZeroDivisionError
        return stream

    def sign(_self: Identity, _data: bytes) -> bytes:
        raise ZeroDivisionError

    with opened(members[1]) as server:
        if fails == "sign":
            # Only the dialler's half of the handshake is broken: the listener signs M2 with the true one.
            true_sign = Identity.sign
            monkeypatch.setattr(
                Identity,
                "sign",
                lambda self, data: (sign if self is members[0].identity else true_sign)(self, data),
            )
        with pytest.raises(ZeroDivisionError):
            dial(server.address, me=membership_of(members[0]), peer_name="beta", timeout_s=WAIT_S, wrap=wrap)
        assert len(made) == 2
        assert all(socket_of(stream).fileno() == -1 for stream in made if isinstance(stream, TlsStream))


def test_a_send_that_nobody_takes_stalls_out_without_a_deadline(tmp_path: Path) -> None:
    alpha, beta = make_local_members(["alpha", "beta"], tmp_path)
    mine, theirs = tls_link_pair(alpha, beta, options=LinkOptions(stall_timeout_s=0.2))
    stream = streams_of(mine)[0]
    with pytest.raises(LinkBroken, match="took nothing before the deadline"):  # noqa: PT012 - buffers fill first
        while True:
            stream.send_all(bytes(1 << 20))
    for link in (mine, theirs):
        for each in streams_of(link):
            each.close()


def test_a_full_listener_is_tried_again_within_the_time_of_a_dial(members: tuple[LocalMember, ...]) -> None:
    """A peer asks its network for its successor once; a flood there must not end the plan."""
    with opened(members[1], LinkOptions(max_half_open=2, handshake_timeout_s=1.0)) as server:
        held = proved_halves(members[0], server, 2)
        listed = replace(members[0].roster.member("beta"), address=server.address)
        link = TcpNetwork().dial(membership_of(members[0]), listed, WAIT_S)
        assert server.links.get(timeout=WAIT_S).peer == "alpha"
        link.close()
        for stream in held:
            stream.close()


def test_a_listener_that_hangs_up_late_is_tried_again_within_the_time_of_a_dial(
    members: tuple[LocalMember, ...],
) -> None:
    """A busy listener says nothing once its deadline is over: no END, no alert."""
    links: queue.SimpleQueue[Link] = queue.SimpleQueue()
    late = iter([True])

    def wrap(stream: Stream) -> Stream:
        if next(late, False):
            raise LinkBroken("the deadline is over")
        return stream

    listener = Listener(("127.0.0.1", 0), membership_of(members[1]), links.put, wrap=wrap)
    listed = replace(members[0].roster.member("beta"), address=listener.address)
    link = TcpNetwork().dial(membership_of(members[0]), listed, 4 * WAIT_S)
    assert links.get(timeout=WAIT_S).peer == "alpha"
    assert next(late, None) is None
    link.close()
    listener.close()


def test_a_refused_certificate_is_no_reason_to_try_again(
    members: tuple[LocalMember, ...], tmp_path: Path
) -> None:
    stranger = make_local_members(["alpha", "beta"], tmp_path / "strangers")[0]
    with opened(members[1]) as server:
        trusting = _with_anchor(stranger, members[1])
        listed = replace(trusting.roster.member("beta"), address=server.address)
        with pytest.raises(HandshakeError, match="unknown ca") as refused:
            TcpNetwork().dial(membership_of(trusting), listed, WAIT_S)
    assert not isinstance(refused.value, HandshakeLate)
