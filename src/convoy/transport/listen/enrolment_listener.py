"""The listener of an invitation: strangers' connections, few at a time, each on a thread of its own.

It has its own socket and its own certificate, and lives for minutes. No link ever begins here.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from convoy.crypto.enrolment import MAX_UNPROVED_CHALLENGES, OneTimeCertificate
from convoy.errors import ConvoyError
from convoy.transport.admission import Admission, AdmissionLimits, LinkRefusal
from convoy.transport.listen.enrolment_tls import STALL_TIMEOUT_S, one_time_context
from convoy.transport.log_limit import RateLimitedLog
from convoy.transport.streams.stream import Stream
from convoy.transport.streams.tcp import TlsStream, start_tls_server

_log = logging.getLogger(__name__)
_ACCEPT_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class EnrolmentLimits:
    """Set the limits of an invitation's listener.

    ``proof_timeout_s`` is total, from accepting a connection to its complete proof.
    ``decision_timeout_s`` is the operator's time to decide. After ``max_unproved_challenges`` challenges
    without a right proof the invitation is over.
    """

    proof_timeout_s: float = 10.0
    decision_timeout_s: float = 300.0
    max_unproved_challenges: int = MAX_UNPROVED_CHALLENGES
    max_half_open: int = 16
    admission: AdmissionLimits = field(
        default_factory=lambda: AdmissionLimits(
            address_rate=1.0,
            address_burst=8,
            strangers_rate=8.0,
            strangers_burst=32,
            max_half_open_per_address=4,
            max_addresses=256,
        )
    )


class EnrolmentListener:
    """Listen on ``sock`` from construction to ``close``. ``on_stream`` gets each stream that has TLS.

    ``on_stream`` runs on that connection's own thread, under the total deadline, and owns the stream. Its
    errors are logged here. Nothing else reports the cause.
    """

    def __init__(
        self,
        sock: socket.socket,
        certificate: OneTimeCertificate,
        on_stream: Callable[[Stream, str], None],
        limits: EnrolmentLimits,
    ) -> None:
        self._socket = sock
        self._context = one_time_context(certificate)
        self._on_stream = on_stream
        self._limits = limits
        self._admission = Admission(limits.admission, limits.max_half_open)
        self._refused = RateLimitedLog(_log)
        self._closed = threading.Event()
        self._socket.settimeout(_ACCEPT_POLL_S)
        self._thread = threading.Thread(target=self._accept, name="enrolment", daemon=True)
        self._thread.start()

    @property
    def num_half_open(self) -> int:
        return self._admission.num_half_open

    def close(self) -> None:
        """Stop accepting. Streams that were handed over belong to their owner."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(2 * _ACCEPT_POLL_S)
        self._socket.close()
        self._refused.flush(everything=True)

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._socket.accept()
            except TimeoutError:
                self._refused.flush()
                continue
            except OSError:
                if self._closed.wait(0.05):
                    return
                # Out of descriptors. Some come back when other connections end.
                continue
            host = str(address[0]).removeprefix("::ffff:")
            try:
                spare = sock.dup()
            except OSError:
                sock.close()
                continue
            self._admit(sock, spare, host)

    def _admit(self, sock: socket.socket, spare: socket.socket, host: str) -> None:
        def cut() -> None:
            # TLS takes over ``sock``, so cutting needs a second handle.
            with contextlib.suppress(OSError):
                spare.shutdown(socket.SHUT_RDWR)

        ticket = self._admission.admit(host, cut)
        if isinstance(ticket, LinkRefusal):
            spare.close()
            sock.close()
            self._refused.warning(ticket.value, f"refused a newcomer from {host}: {ticket.value}")
            return

        def judge() -> None:
            try:
                self._judge(sock, host)
            finally:
                ticket.release()
                spare.close()

        try:
            threading.Thread(target=judge, name="newcomer", daemon=True).start()
        # The system has no thread left. Some come back when other handshakes end.
        except RuntimeError:
            ticket.release()
            spare.close()
            sock.close()

    def _judge(self, sock: socket.socket, host: str) -> None:
        deadline_s = time.monotonic() + self._limits.proof_timeout_s
        stream: Stream | None = None
        try:
            stream = TlsStream(start_tls_server(sock, self._context, deadline_s), STALL_TIMEOUT_S)
            stream.set_deadline(deadline_s)
            self._on_stream(stream, host)
        except ConvoyError as error:
            if stream is not None:
                stream.close()
            cause = type(error).__name__
            self._refused.warning(cause, f"refused a newcomer from {host}: {error.message}")
