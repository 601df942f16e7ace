"""Run the inner handshake over two streams, and make the link that results from it.

The other end sees the same END frame for every cause of failure. The cause stays at this end.
"""

from __future__ import annotations

import contextlib
import struct
from typing import NoReturn

from convoy.crypto.cipher import local_ciphers
from convoy.crypto.claims import (
    LINK_ID_BYTES,
    NO_LINK,
    PROTOCOL_VERSION,
    HandshakeContext,
    check_roster,
    claimed_version,
    incompatible_version,
)
from convoy.crypto.handshake import Initiator, Responder, Secrets
from convoy.crypto.seal import make_sealing
from convoy.errors import ConvoyError, HandshakeError, HandshakeLate, LinkBroken
from convoy.transport.link.facts import LinkFacts
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember, Member
from convoy.transport.options import LinkOptions
from convoy.transport.streams.stream import Stream, recv_exactly
from convoy.transport.streams.tcp import is_tls_refusal
from convoy.wire.frame import HANDSHAKE_PREAMBLE_BYTES, decode_preamble, encode_handshake
from convoy.wire.messages.control import FrameType

TO_LISTENER = 0
TO_DIALLER = 1

_OPENING = struct.Struct(f">B{LINK_ID_BYTES}s")
_END = struct.Struct(">HQ32s")


def send_opening(stream: Stream, direction: int, link_id: bytes) -> None:
    """Send the first bytes of a connection: its link id, and the direction in which it will carry frames."""
    stream.send_all(encode_handshake(FrameType.OPENING, _OPENING.pack(direction, link_id)))


def receive_opening(stream: Stream) -> tuple[int, bytes]:
    """Read an opening and return (direction, link id). Raises `HandshakeError` or `FrameError`."""
    kind, payload = _receive_frame(stream)
    if kind is not FrameType.OPENING or len(payload) != _OPENING.size:
        raise HandshakeError(f"a connection began with {kind.name} of {len(payload)} bytes, expected OPENING")
    direction, link_id = _OPENING.unpack(payload)
    if direction not in (TO_LISTENER, TO_DIALLER):
        raise HandshakeError(f"a connection claims direction {direction}, expected 0 or 1")
    return direction, link_id


def establish_initiator(
    me: LocalMember,
    peer: Member,
    link_id: bytes,
    streams: tuple[Stream, Stream],
    options: LinkOptions,
    *,
    version: int = PROTOCOL_VERSION,
    replaces: bytes = NO_LINK,
) -> Link:
    """Run the dialling end over (outgoing, incoming) and return the link.

    The streams' deadline is set already.

    ``replaces`` is the id of the standing link that this one is to replace. A failure closes both streams
    and raises `ConvoyError`.
    """
    context = handshake_context(me, me.member, peer, link_id, version, replaces=replaces)
    try:
        with Initiator(context, me.identity.sign, options.ciphers or local_ciphers()) as handshake:
            streams[0].send_all(encode_handshake(FrameType.HANDSHAKE_1, handshake.create_1()))
            # A listener that is late closes the connection, and one that refuses sends END first.
            answer = _expect(FrameType.HANDSHAKE_2, streams[1], context, peer.name, ended=HandshakeLate)
            handshake.consume_2(answer)
            message_3, secrets = handshake.create_3()
            streams[0].send_all(encode_handshake(FrameType.HANDSHAKE_3, message_3))
            return _link(peer, context, streams, secrets, options)
    except ConvoyError as error:
        raise _refuse(streams, context, peer.name, error) from error
    except BaseException:
        _close(streams)
        raise


def establish_responder(
    me: LocalMember,
    peer: Member,
    link_id: bytes,
    streams: tuple[Stream, Stream],
    options: LinkOptions,
    *,
    version: int = PROTOCOL_VERSION,
) -> Link:
    """Run the listening end over (outgoing, incoming) and return the link.

    ``peer`` is the member that the pinned TLS certificate belongs to. A failure closes both streams and
    raises `ConvoyError`.
    """
    context = handshake_context(me, peer, me.member, link_id, version)
    try:
        with Responder(context, me.identity.sign, options.ciphers or local_ciphers()) as handshake:
            handshake.consume_1(_expect(FrameType.HANDSHAKE_1, streams[1], context, peer.name))
            streams[0].send_all(encode_handshake(FrameType.HANDSHAKE_2, handshake.create_2()))
            secrets = handshake.consume_3(_expect(FrameType.HANDSHAKE_3, streams[1], context, peer.name))
            return _link(peer, context, streams, secrets, options)
    except ConvoyError as error:
        raise _refuse(streams, context, peer.name, error) from error
    except BaseException:
        _close(streams)
        raise


def handshake_context(
    me: LocalMember,
    initiator: Member,
    responder: Member,
    link_id: bytes,
    version: int,
    *,
    replaces: bytes = NO_LINK,
) -> HandshakeContext:
    roster = me.roster
    return HandshakeContext(
        initiator.party,
        responder.party,
        link_id,
        roster.cluster_id,
        roster.epoch,
        roster.digest,
        version,
        replaces,
    )


def _link(
    peer: Member,
    context: HandshakeContext,
    streams: tuple[Stream, Stream],
    secrets: Secrets,
    options: LinkOptions,
) -> Link:
    # With different epochs only a roster crosses this link, so the handshake's deadline stays in force.
    if secrets.peer_epoch == context.roster_epoch:
        for stream in streams:
            stream.set_deadline(None)
    sealing = make_sealing(secrets, options.key_limits)
    facts = LinkFacts(
        member=peer,
        link_id=context.link_id,
        binding=secrets.binding,
        replaces=secrets.replaces,
        cipher=secrets.cipher.title,
        cluster_id=context.cluster_id,
        epoch=context.roster_epoch,
        peer_epoch=secrets.peer_epoch,
    )
    return Link(
        facts=facts,
        streams=streams,
        sealing=sealing,
        options=options,
        read_end=lambda payload: _read_end(payload, context, peer.name),
    )


def _receive_frame(stream: Stream, ended: type[HandshakeError] = HandshakeError) -> tuple[FrameType, bytes]:
    """Return a frame's type and payload. Raises ``ended`` if the other end closed the connection first."""
    preamble = recv_exactly(stream, HANDSHAKE_PREAMBLE_BYTES)
    if len(preamble) < HANDSHAKE_PREAMBLE_BYTES:
        raise ended("the other end closed the connection during the handshake")
    kind, length = decode_preamble(preamble)
    payload = recv_exactly(stream, length)
    if len(payload) < length:
        raise ended("the other end closed the connection inside a handshake message")
    return kind, bytes(payload)


def _expect(
    kind: FrameType,
    stream: Stream,
    context: HandshakeContext,
    peer: str,
    *,
    ended: type[HandshakeError] = HandshakeError,
) -> bytes:
    got, payload = _receive_frame(stream, ended)
    # A refusal may come in place of any answer.
    if got is FrameType.HANDSHAKE_END:
        _read_end(payload, context, peer)
    if got is not kind:
        raise HandshakeError(f"{peer} sent {got.name}, expected {kind.name}")
    return payload


def _read_end(payload: bytes, context: HandshakeContext, peer: str) -> NoReturn:
    """Raise the error that END stands for: another version, another roster, or a plain refusal."""
    version = claimed_version(payload)
    if version != context.version:
        raise incompatible_version(peer, version, context.version)
    if len(payload) == _END.size:
        _, epoch, digest = _END.unpack(payload)
        check_roster(context, peer, epoch, digest)
    raise HandshakeError(f"{peer} refused the handshake", hint=f"the reason stands in the log of {peer}")


def _refuse(
    streams: tuple[Stream, Stream], context: HandshakeContext, peer: str, error: ConvoyError
) -> ConvoyError:
    """Tell the other end that the handshake is over, but not why; close; return the error for this end's
    caller.

    The handshake's deadline still holds: once it has passed, nothing is sent.
    """
    end = _END.pack(context.version, context.roster_epoch, context.roster_digest)
    # The peer may have hung up already. The caller has the cause in any case.
    with contextlib.suppress(LinkBroken):
        streams[0].send_all(encode_handshake(FrameType.HANDSHAKE_END, end))
    _close(streams)
    if isinstance(error, LinkBroken):
        return broke_off(peer, error)
    return type(error)(error.message, hint=error.hint)


def broke_off(peer: str, error: LinkBroken) -> HandshakeError:
    """Return the error of a handshake whose connection ended: `HandshakeError` if TLS refused, else
    `HandshakeLate`.

    A refusal comes as END or as an alert of TLS. A busy machine is silent, or closes the connection without
    either once its deadline has passed, so the caller may try again.
    """
    kind = HandshakeError if is_tls_refusal(error.__cause__) else HandshakeLate
    return kind(f"the handshake with {peer} broke off: {error.message}")


def _close(streams: tuple[Stream, Stream]) -> None:
    for stream in streams:
        stream.close()
