"""Two linked members inside one process: the whole inner handshake and all the sealing, without sockets."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable

from convoy.crypto.claims import LINK_ID_BYTES, NO_LINK
from convoy.errors import ConvoyError, Incompatible
from convoy.testing.streams import Fault, RecordedStream, memory_stream_pair
from convoy.transport.link.establish import establish_initiator, establish_responder
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember
from convoy.transport.membership import Membership
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream
from convoy.transport.transfer import settle


def memory_link_pair(
    me: LocalMember,
    other: LocalMember,
    *,
    faults: Iterable[Fault] = (),
    record: tuple[bytearray, bytearray] | None = None,
    options: LinkOptions | None = None,
    replaces: bytes = NO_LINK,
) -> tuple[Link, Link]:
    """Return (``me``'s end, ``other``'s end), neither started. Raises the errors of the handshake.

    ``faults`` apply to the writes of ``me``: write 0 is M1, 1 is M3, and sealed frames follow from 2 on.
    ``record`` collects the bytes that (``me``, ``other``) hand to their streams, which the outer layer
    would get. Connections that replace used-up ones have no faults.
    """
    options = options or LinkOptions()
    link, standing = _pair(me, other, faults=faults, record=record, options=options, replaces=replaces)

    def redial() -> Link:
        fresh = _pair(me, other, faults=(), record=record, options=options, replaces=link.link_id)
        standing.keep(fresh[1])
        return fresh[0]

    link.replace_with(redial)
    return link, standing


def _pair(
    me: LocalMember,
    other: LocalMember,
    *,
    faults: Iterable[Fault],
    record: tuple[bytearray, bytearray] | None,
    options: LinkOptions,
    replaces: bytes,
) -> tuple[Link, Link]:
    there = memory_stream_pair(faults)
    back = memory_stream_pair()
    mine: Stream = there[0]
    others: Stream = back[1]
    if record is not None:
        mine, others = RecordedStream(mine, record[0]), RecordedStream(others, record[1])
    for stream in (*there, *back):
        stream.set_deadline(time.monotonic() + options.handshake_timeout_s)
    link_id = os.urandom(LINK_ID_BYTES)
    answered: list[Link | ConvoyError] = []

    def respond() -> None:
        try:
            from_me = other.roster.member(me.name)
            answered.append(establish_responder(other, from_me, link_id, (others, there[1]), options))
        except ConvoyError as error:
            answered.append(error)

    responder = threading.Thread(target=respond, name="handshake", daemon=True)
    responder.start()
    try:
        peer = me.roster.member(other.name)
        link = establish_initiator(me, peer, link_id, (mine, back[0]), options, replaces=replaces)
    finally:
        responder.join()
    if isinstance(answered[0], ConvoyError):
        link.close()
        raise answered[0]
    return link, answered[0]


def settled_link_pair(
    me: Membership,
    other: Membership,
    *,
    faults: Iterable[Fault] = (),
    record: tuple[bytearray, bytearray] | None = None,
    options: LinkOptions | None = None,
) -> tuple[Link, Link]:
    """Link two members as `memory_link_pair` does, after sending the newer roster to the end that lags."""
    for _ in range(2):
        me.require_valid()
        other.require_valid()
        mine, others = memory_link_pair(
            me.current, other.current, faults=faults, record=record, options=options
        )
        if mine.facts.peer_epoch == mine.facts.epoch:
            return mine, others
        there = threading.Thread(target=_settle_quietly, args=(others, other), daemon=True)
        there.start()
        try:
            settle(mine, me)
        finally:
            there.join()
    raise Incompatible(f"{me.name} and {other.name} did not come to one roster")


def _settle_quietly(link: Link, membership: Membership) -> None:
    # The dialling end reports the same failure to the caller.
    with contextlib.suppress(ConvoyError):
        settle(link, membership)
