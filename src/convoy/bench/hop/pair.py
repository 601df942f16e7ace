"""Connect the two processes of the hop bench in three ways: `both` layers, `outer` and `none`."""

from __future__ import annotations

import queue
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from convoy.bench.hop.carrier import Carrier, LinkCarrier, StreamCarrier
from convoy.bench.hop.connection import accept_plain, accept_tls, bench_member, make_members
from convoy.bench.hop.names import HOME, HOST
from convoy.cluster.children import Started, end
from convoy.config.temporary_folder import temporary_folder
from convoy.errors import PeerError, PeerUnreachable
from convoy.transport.link.link import Link
from convoy.transport.listen.listener import Listener

_START_S = 20.0
_STOP_S = 5.0
_POLL_S = 0.2
_LOG = "echo.log"


class HopPair(Started):
    """Start the second process. Leaving the `with` ends it and removes every file, also on Ctrl-C.

    ``carriers`` are by sealing: "none", "outer", "both". Raises `PeerError` if the process does not connect.
    """

    carriers: dict[str, Carrier]
    cipher: str

    def _start(self) -> None:
        directory = self._stack.enter_context(temporary_folder())
        operator_key = make_members(directory)
        me = bench_member(directory, HOME, operator_key)
        links: queue.SimpleQueue[Link] = queue.SimpleQueue()
        # The listeners close once all three ways are connected; only the connections stay open.
        with ExitStack() as listening:
            listener = Listener((HOST, 0), me, links.put)
            listening.callback(listener.close)
            tls = listening.enter_context(socket.create_server((HOST, 0)))
            plain = listening.enter_context(socket.create_server((HOST, 0)))
            ports = [listener.address[1], tls.getsockname()[1], plain.getsockname()[1]]
            process = self._spawn(directory, [operator_key.hex(), *map(str, ports)])
            link = LinkCarrier(first_link(links, process, directory / _LOG))
            self._stack.callback(link.close)
            self.cipher = link.cipher
            outer = self._keep(StreamCarrier(*accept_tls(tls, me.current, _START_S)))
            none = self._keep(StreamCarrier(*accept_plain(plain, _START_S)))
        self.carriers = {"none": none, "outer": outer, "both": link}

    def _keep(self, carrier: StreamCarrier) -> StreamCarrier:
        self._stack.callback(carrier.close)
        return carrier

    def _spawn(self, directory: Path, arguments: list[str]) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context((directory / _LOG).open("wb"))
        process = subprocess.Popen(
            [sys.executable, "-m", "convoy.bench.hop.echo", str(directory), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Ctrl-C must reach only this process, which then ends the other one.
            start_new_session=True,
        )
        self._stack.callback(end, process, _STOP_S)
        return process


def first_link(links: queue.SimpleQueue[Link], process: subprocess.Popen[bytes], log: Path) -> Link:
    """Return the link that a process dialled; ``log`` is its output.

    Raises `PeerError`, with the last line of the log if the process ended.
    """
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s:
        try:
            return links.get(timeout=_POLL_S)
        except queue.Empty:
            if process.poll() is not None:
                last = log.read_text(errors="replace").splitlines()[-1:] or ["no output"]
                raise PeerError(
                    f"the second process ended with exit status {process.returncode}: {last[0]}"
                ) from None
    raise PeerUnreachable(f"the second process did not connect within {_START_S:g} s")
