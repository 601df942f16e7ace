"""A listener in a process of its own, and crowds before it: the effect of a flood on memory and on
others.

with ListenerProcess(tmp_path, ["beta", "alpha"]) as listener:   # listens as beta
    crowd = Crowd(listener.address, hosts)
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import psutil

from convoy.crypto.identity import Identity, OperatorKey
from convoy.errors import ConvoyError, HandshakeLate, PeerUnreachable
from convoy.transport.dial import dial
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener
from convoy.transport.member import LocalMember
from convoy.trust.roster.roster import open_roster, sign_roster
from support.members import make_local_members, membership_of

_ROOT = Path(__file__).resolve().parents[2]
_TESTS = Path(__file__).resolve().parents[1]


class ListenerProcess:
    """Run a real `Listener` of the first member of ``names``. It keeps new links, started and idle."""

    def __init__(self, directory: Path, names: Sequence[str]) -> None:
        self.members = make_local_members(names, directory)
        operator = OperatorKey.generate()
        roster = directory / "roster"
        roster.write_bytes(sign_roster(self.members[0].roster, operator))
        search = os.pathsep.join([str(_ROOT / "src"), str(_TESTS)])
        self.log = directory / "listener.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "support.listener_process",
                    names[0],
                    directory,
                    operator.public_key.hex(),
                ],
                env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self._process.stdout is not None
        self.address = ("127.0.0.1", int(self._process.stdout.readline()))
        self._seen = psutil.Process(self._process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)

    def rss_bytes(self) -> int:
        return int(self._seen.memory_info().rss)

    def num_threads(self) -> int:
        return int(self._seen.num_threads())

    def num_descriptors(self) -> int:
        return int(self._seen.num_fds())


class Peak:
    """Measure the most memory, threads and descriptors of a listener's process while the block runs."""

    def __init__(self, listener: ListenerProcess) -> None:
        self._listener = listener
        self.over = threading.Event()
        self.rss_bytes = self.num_threads = self.num_descriptors = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self.over.wait(0.05):
            self.rss_bytes = max(self.rss_bytes, self._listener.rss_bytes())
            self.num_threads = max(self.num_threads, self._listener.num_threads())
            self.num_descriptors = max(self.num_descriptors, self._listener.num_descriptors())


class Crowd:
    """Open ``num`` connections from ``hosts`` in turn, at ``per_s``, that send ``greeting`` byte by byte.

    With an empty ``greeting`` they send nothing. It runs until all were opened and ``close`` is called.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hosts: Sequence[str],
        num: int,
        *,
        per_s: float = 5000.0,
        greeting: bytes = b"",
        byte_every_s: float = 0.1,
    ) -> None:
        self._address = address
        self._hosts = hosts
        self._num = num
        self._per_s = per_s
        self._greeting = greeting
        self._byte_every_s = byte_every_s
        self._sockets: dict[socket.socket, int] = {}
        self._selector = selectors.DefaultSelector()
        self.over = threading.Event()
        self.opened = 0
        self.hung_up = 0
        self.done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="crowd", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.over.set()
        self._thread.join()
        for sock in self._sockets:
            sock.close()

    def _run(self) -> None:
        started_s = time.monotonic()
        written_s = started_s
        while not self.over.is_set():
            due = min(self._num, int((time.monotonic() - started_s) * self._per_s) + 1)
            while self.opened < due and not self.over.is_set():
                self._open()
            if self.opened == self._num:
                self.done.set()
            self._notice_ends()
            if self._greeting and time.monotonic() - written_s > self._byte_every_s:
                written_s = time.monotonic()
                self._write()
            self.over.wait(0.01)

    def _open(self) -> None:
        sock = socket.socket()
        sock.settimeout(5)
        try:
            sock.bind((self._hosts[self.opened % len(self._hosts)], 0))
            sock.connect(self._address)
        except OSError:
            sock.close()
            self.hung_up += 1
        else:
            sock.setblocking(False)
            self._sockets[sock] = 0
            self._selector.register(sock, selectors.EVENT_READ)
        self.opened += 1

    def _notice_ends(self) -> None:
        for key, _ in self._selector.select(0):
            sock = key.fileobj
            assert isinstance(sock, socket.socket)
            with contextlib.suppress(OSError):
                if sock.recv(4096):
                    continue
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        del self._sockets[sock]
        sock.close()
        self.hung_up += 1

    def _write(self) -> None:
        for sock, sent in list(self._sockets.items()):
            try:
                sock.send(self._greeting[sent : sent + 1])
            except BlockingIOError:
                continue
            except OSError:
                self._forget(sock)
                continue
            self._sockets[sock] = min(sent + 1, len(self._greeting) - 1)


def client_hello(me: LocalMember) -> bytes:
    """Return the first bytes of an honest TLS handshake, for clients that send them slowly."""
    import ssl

    from convoy.transport.streams.tcp import client_context

    written = ssl.MemoryBIO()
    tls = client_context(me).wrap_bio(ssl.MemoryBIO(), written)
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return written.read()


def link_within(me: LocalMember, peer: str, address: tuple[str, int], timeout_s: float) -> tuple[Link, float]:
    """Make a link as a head does, trying again where it may. Return the link and the seconds it took."""
    started_s = time.monotonic()
    while True:
        left_s = started_s + timeout_s - time.monotonic()
        try:
            link = dial(address, me=membership_of(me), peer_name=peer, timeout_s=max(0.1, min(5.0, left_s)))
            return link, time.monotonic() - started_s
        except (PeerUnreachable, HandshakeLate):
            if left_s <= 0:
                raise
            time.sleep(0.2)


def _main(name: str, directory: Path, operator_key: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    signed = open_roster((directory / "roster").read_bytes(), operator_key=bytes.fromhex(operator_key))
    me = LocalMember(name, Identity.load(directory / name), signed.roster)
    links: list[Link] = []

    def keep(link: Link) -> None:
        links.append(link)
        link.start(lambda _link, _received: None, _forget, frozenset())

    def _forget(link: Link, _error: ConvoyError) -> None:
        links.remove(link)

    listener = Listener(("0.0.0.0", 0), membership_of(me), keep)  # noqa: S104 - as a member listens
    print(listener.address[1], flush=True)
    sys.stdin.read()
    listener.close()


if __name__ == "__main__":
    _main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
