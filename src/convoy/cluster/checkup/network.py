"""Examine the network between members: addresses, ports, and a real link to each peer that does no work.

A link for an examination is dialled, pinged and closed. It sends no `Hello`, so a peer never takes it for
its head's link, and it has no place in a ring. A running cluster does not notice it.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Callable, Iterator

from convoy.cluster.checkup.finding import Finding, fail, ok, warn
from convoy.errors import ConvoyError, HandshakeError, Incompatible, LinkBroken, PeerUnreachable
from convoy.transport.link.link import Link
from convoy.transport.member import LocalMember, Member, Roster
from convoy.transport.streams.tcp import client_context, peer_certificate, start_tls_client
from convoy.trust.roster.addresses import sharing_address
from convoy.trust.roster.roster import format_address

_NUM_PINGS = 5
_PING_WAIT_S = 2.0
_PROBE_S = 2.0
ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound
_SIGN_AGAIN = "sign a roster with the right address: `convoy roster add` with a new card"


def check_address(member: Member, *, mine: bool) -> Iterator[Finding]:
    """Check that the host in the roster has an address, and for this member that it is of this machine."""
    host, port = member.address
    where = f"{member.name} at {format_address(member.address)}"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = str(getattr(error, "strerror", None) or "no such name can exist").lower()
        yield fail(f"{where}: {host} has no address: {reason}", f"mend DNS or /etc/hosts, or {_SIGN_AGAIN}")
        return
    addresses = list(dict.fromkeys(str(place[0]) for _, _, _, _, place in found))
    shown = where if addresses == [host] else f"{where} is {', '.join(addresses)}"
    if not mine:
        yield ok(shown)
    elif any(_is_local(family, place) for family, _, _, _, place in found):
        yield ok(f"{shown}, an address of this machine")
    else:
        yield warn(
            f"{shown}, which is no address of this machine",
            f"right behind a forwarded port only; otherwise {_SIGN_AGAIN}",
        )


def _is_local(family: int, place: tuple[object, ...]) -> bool:
    """Return whether an address belongs to this machine: only such an address can be bound."""
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        try:
            sock.bind((place[0], 0, *place[2:]))
        except OSError as error:
            return error.errno != errno.EADDRNOTAVAIL
        return True


def check_loopback(roster: Roster, name: str) -> Iterator[Finding]:
    """Warn of loopback addresses in a roster of several machines, which cannot reach one another there."""
    loopback = [member.name for member in roster.members if _is_loopback(member.address[0])]
    if loopback and len(loopback) < len(roster.members):
        yield warn(
            f"{', '.join(loopback)} can be reached from one machine alone, and others are elsewhere",
            _SIGN_AGAIN,
        )
    elif name in loopback:
        yield ok("every member is on this machine")


def _is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"


def check_own_addresses(roster: Roster) -> Iterator[Finding]:
    """Check that no two members have one host and port.

    A new signature refuses such a roster; older rosters may have them.
    """
    for first, other in sharing_address(roster.members):
        yield fail(
            f"{first.name} and {other.name} both have the address {format_address(other.address)}: a dial to "
            f"one of them may reach the other",
            f"let {other.name} in again at another port, by `convoy invite` and there `convoy join - --port "
            f"PORT`; or `convoy roster remove {other.name}`, and add it with a card of another address",
        )


def at_address_of(roster: Roster, name: str) -> set[str]:
    """Return the other members at ``name``'s host and port. A dial from here tells nothing about them."""
    groups: dict[str, set[str]] = {}
    for first, other in sharing_address(roster.members):
        groups.setdefault(first.name, {first.name}).add(other.name)
    return next((group - {name} for group in groups.values() if name in group), set())


def check_listen(me: LocalMember, host: str, port: int | None) -> Iterator[Finding]:
    """Check that this member can listen at its configured address, or does so already."""
    listed = me.member.address[1]
    port = listed if port is None else port
    if port != listed:
        yield warn(
            f"[listen] port is {port}, and the roster tells the others {listed}",
            "right behind a forwarded port only; otherwise remove [listen] port",
        )
    taken = bind_error(host, port)
    where = format_address((host, port))
    if taken is None:
        yield ok(f"{where} is free to listen on")
    elif taken.errno != errno.EADDRINUSE:
        reason = (taken.strerror or "unusable").lower()
        yield fail(f"cannot listen on {where}: {reason}", "set [listen] host to an address of this machine")
    else:
        yield _who_listens(me, "127.0.0.1" if host in ANYWHERE else host, port)


def _who_listens(me: LocalMember, host: str, port: int) -> Finding:
    where = format_address((host, port))
    free_it = f"find it with `ss -ltnp 'sport = :{port}'`, and end it or choose another port"
    try:
        certificate = _shown_certificate(me, host, port)
    except (ConvoyError, OSError):
        return fail(f"{where} is taken by another program", free_it)
    owner = me.roster.member_with_certificate(certificate)
    if owner is not None and owner.name == me.name:
        return ok(f"{me.name} runs and listens on {where}")
    other = "another program" if owner is None else f"{owner.name}, another member"
    return fail(f"{where} is taken by {other}", free_it)


def _shown_certificate(me: LocalMember, host: str, port: int) -> bytes:
    deadline_s = time.monotonic() + _PROBE_S
    sock = socket.create_connection((host, port), timeout=_PROBE_S)
    secured = start_tls_client(sock, client_context(me), deadline_s)
    try:
        return peer_certificate(secured)
    finally:
        secured.close()


def check_http(host: str, port: int, answers: Callable[[], bool]) -> Iterator[Finding]:
    """Check the port that a head serves HTTP on.

    ``answers`` returns whether a head of Convoy already uses it.
    """
    where = format_address((host, port))
    taken = bind_error(host, port)
    if taken is None:
        yield ok(f"{where} is free for HTTP")
    elif taken.errno == errno.EADDRINUSE and answers():
        yield ok(f"a head of Convoy runs and serves HTTP on {where}")
    else:
        reason = (taken.strerror or "unusable").lower()
        yield fail(
            f"cannot serve HTTP on {where}: {reason}", "set another [serve] port, or end the program on it"
        )


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error of listening there now; None if it is possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        socket.create_server((host, port), family=family).close()
    except UnicodeError:
        return OSError(errno.EADDRNOTAVAIL, "no such name can exist")
    except OSError as error:
        return error
    return None


def check_epochs(before: int, after: int) -> Iterator[Finding]:
    """Report that a peer had a newer roster, which a link brings along."""
    if after > before:
        yield ok(
            f"a peer has roster epoch {after}, newer than epoch {before} here: a link brings it along, and "
            f"this member accepts it by itself once it runs"
        )


def check_peer(member: Member, dial: Callable[[Member], Link]) -> Iterator[Finding]:
    """Check reachability, identity and round trip of one other member, through both layers."""
    where = f"{member.name} at {format_address(member.address)}"
    try:
        link = dial(member)
    except PeerUnreachable as error:
        yield _unreachable(member, error)
    except Incompatible as error:
        yield fail(error.message, error.hint or f"bring {member.name} and this member to the same release")
    except HandshakeError as error:
        yield fail(
            f"{where} did not prove to be {member.name}, or did not accept this member: {error.message}",
            error.hint or "compare `convoy identity show` there with `convoy roster show` here and there",
        )
    else:
        yield _round_trip(link, where)


def _unreachable(member: Member, error: PeerUnreachable) -> Finding:
    if member.head:
        # A head dials its peers and is dialled by none, so its silence is expected.
        return ok(f"{member.name} does not listen now, as heads do not: {error.message}")
    return fail(
        error.message,
        f"on {member.name}: `convoy join` in that member's folder, and open port {member.address[1]} in its "
        f"firewall; or mend its address in the roster",
    )


def _round_trip(link: Link, where: str) -> Finding:
    link.start(lambda _link, _received: None, lambda _link, _error: None, frozenset())
    try:
        trips = [link.ping(_PING_WAIT_S) for _ in range(_NUM_PINGS)]
    except (PeerUnreachable, LinkBroken) as error:
        return fail(
            f"{where} proved its identity, and then: {error.message}", f"look at the log of {link.peer}"
        )
    finally:
        with contextlib.suppress(ConvoyError):
            link.close("an examination is over")
    return ok(f"{where} proved its identity; {min(trips) * 1000:.2f} ms there and back under {link.cipher}")
