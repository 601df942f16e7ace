"""The inside of a live link or listener: halves, connections, sockets, keys and threads that users never see.

`Link` has no public way to them, and must not get one: nothing in the package needs a link's keys, or a frame
that was not sealed in its turn. Tests of attacks, of wiped secrets and of stalls do. So they reach them here,
in one place, and a change inside of links changes this module alone.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable

from convoy.crypto.seal import FrameOpener, FrameSealer
from convoy.errors import ConvoyError
from convoy.transport.link.incoming import Incoming
from convoy.transport.link.link import Link
from convoy.transport.link.outgoing import Outgoing
from convoy.transport.listen.listener import Listener
from convoy.transport.streams.stream import Stream
from convoy.transport.streams.tcp import TlsStream


def streams_of(link: Link) -> tuple[Stream, ...]:
    """Return the connections of the link: the one that it sends on first."""
    return link._streams


def cut(link: Link) -> None:
    """End the connections without a word, as when a machine goes."""
    for stream in streams_of(link):
        stream.close()


def outgoing_of(link: Link) -> Outgoing:
    return link._outgoing


def incoming_of(link: Link) -> Incoming:
    return link._incoming


def sealer_of(link: Link) -> FrameSealer:
    return link._outgoing._sealer


def opener_of(link: Link) -> FrameOpener:
    return link._incoming._opener


def threads_of(link: Link) -> list[threading.Thread]:
    return link._threads


def stop_writing(link: Link) -> None:
    """Leave a write under way that the peer does not take: nothing leaves the link any more."""
    link._outgoing._busy = True


def go_on_writing(link: Link) -> None:
    link._outgoing._busy = False


def is_writing(link: Link) -> bool:
    return link._outgoing._busy


def has_to_write(link: Link) -> bool:
    return bool(link._outgoing._queue) or link._outgoing._busy


def replace_sending_stream(link: Link, stream: Stream) -> None:
    """Let the link send over ``stream`` from now on."""
    link._outgoing._stream = stream


def sending_stream(link: Link) -> Stream:
    return link._outgoing._stream


def receiving_stream(link: Link) -> Stream:
    return link._incoming._stream


def num_waiting_pings(link: Link) -> int:
    return len(link._pings._waiting)


def cluster_of(link: Link) -> bytes:
    """Return the cluster's tag in the header of each frame."""
    return link._outgoing._cluster


def num_buffer_bytes(link: Link) -> int:
    """Return the bytes of the buffer that frames arrive in."""
    return len(link._incoming._view)


def end_at_once(link: Link, error: ConvoyError) -> None:
    """End the link without a goodbye, and without waiting for its threads."""
    link._end(error)


def socket_of(stream: Stream) -> ssl.SSLSocket:
    assert isinstance(stream, TlsStream)
    return stream._sock


def limit_buffers(stream: Stream, num_bytes: int) -> None:
    """Limit the socket's buffers as between two machines: a connection takes little unread."""
    for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        socket_of(stream).setsockopt(socket.SOL_SOCKET, size, num_bytes)


def note_server_names(listener: Listener, note: Callable[[str | None], None]) -> None:
    """Tell ``note`` the server name that each dialler asks for."""
    listener._context.sni_callback = lambda _sock, name, _context: note(name)


def num_lone_halves(listener: Listener) -> int:
    """Return how many connections wait for the other one of their link."""
    return len(listener._halves)
