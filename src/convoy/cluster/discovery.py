"""Members find each other on the local network by mDNS.

The roster stays the only authority on their identity. A listening member announces a salt, H(label, salt,
identity key), and its port, under names that are random per start. A holder of the roster recognises the
key. No other listener learns which member it is, nor that two starts were of one member. A found address
is one to try, never a proof.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.crypto.keys import prefixed
from convoy.errors import ConfigError
from convoy.transport.admission import TokenBucket
from convoy.transport.link.link import Link
from convoy.transport.member import Member
from convoy.transport.membership import Membership
from convoy.transport.network import Listening, OnLink, TcpNetwork
from convoy.transport.options import LinkOptions

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

_log = logging.getLogger(__name__)

SERVICE = "_convoy._tcp.local."
SALT_BYTES = 16
FINGERPRINT_BYTES = 16
# Instances of one member. Others may repeat its announcement with addresses of theirs.
MAX_INSTANCES = 8
# Addresses of one instance.
MAX_ADDRESSES = 8
_LABEL = b"convoy discovery v1"
_JUDGED_PER_S = 200.0
_JUDGED_BURST = 1000.0
_LOOK_AGAIN_S = 5.0
# All addresses of this machine, of both kinds.
_ANY = "::"

Address = tuple[str, int]
Members = Callable[[], Iterable[Member]]


def fingerprint(salt: bytes, identity_key: bytes) -> bytes:
    """Return the fingerprint that a member announces: 16 bytes that fit one salt and one key."""
    return hashlib.sha256(prefixed(_LABEL, salt, identity_key)).digest()[:FINGERPRINT_BYTES]


class Sightings:
    """Hold the addresses that members announced, bounded for any announcements.

    ``members`` returns the roster's members now.
    """

    def __init__(self, members: Members, clock: Callable[[], float] = time.monotonic) -> None:
        self._members = members
        self._clock = clock
        self._lock = threading.Lock()
        self._judged = TokenBucket(_JUDGED_PER_S, _JUDGED_BURST, self._clock())
        self._found: dict[str, OrderedDict[str, tuple[Address, ...]]] = {}
        self._member_of: dict[str, str] = {}

    @property
    def num_instances(self) -> int:
        """Return how many announcements are held."""
        return len(self._member_of)

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the members that announced themselves."""
        return frozenset(self._found)

    def judge(
        self,
        instance: str,
        text: dict[bytes, bytes | None],
        addresses: Iterable[Address],
        *,
        again: bool = False,
    ) -> None:
        """Note one announcement. One that is not of a member of the roster leaves no trace.

        ``again``: not counted in the rate, because this process asked.
        """
        salt, said = text.get(b"s"), text.get(b"f")
        if salt is None or said is None or len(text) != 2:
            return
        if len(salt) != SALT_BYTES or len(said) != FINGERPRINT_BYTES:
            return
        if not again and not self._judged.take(self._clock()):
            return
        for member in self._members():
            if fingerprint(salt, member.identity_key) == said:
                self._keep(member.name, instance, tuple(_usable(addresses)))
                return

    def forget(self, instance: str) -> None:
        """Forget an instance that said goodbye or expired."""
        with self._lock:
            name = self._member_of.pop(instance, None)
            if name is not None:
                self._found[name].pop(instance, None)

    def find(self, name: str) -> tuple[Address, ...]:
        """Return addresses at which ``name`` may be, the newest first."""
        with self._lock:
            instances = reversed(self._found.get(name, OrderedDict()).values())
            return tuple(dict.fromkeys(address for addresses in instances for address in addresses))

    def _keep(self, name: str, instance: str, addresses: tuple[Address, ...]) -> None:
        with self._lock:
            before = self._member_of.get(instance, name)
            # An announcement may repeat those of two members under one name.
            if before != name:
                self._found[before].pop(instance, None)
            known = self._found.setdefault(name, OrderedDict())
            known[instance] = addresses
            known.move_to_end(instance)
            self._member_of[instance] = name
            if len(known) > MAX_INSTANCES:
                gone, _ = known.popitem(last=False)
                del self._member_of[gone]


@dataclass(eq=False)
class _Announcement:
    """Hold a listener of this process, and its present announcement."""

    identity_key: bytes
    bound: Address
    info: ServiceInfo


class Discovery:
    """Run the mDNS side of one process: announce its listeners, and hear announcements of others.

    Raises `ConfigError` if the extra is not installed or mDNS cannot start here.
    """

    def __init__(self, members: Members) -> None:
        sightings = self._sightings = Sightings(members)
        self._zeroconf = _start_zeroconf()
        from zeroconf import ServiceBrowser, ServiceStateChange

        def heard(zeroconf: Zeroconf, name: str, state_change: ServiceStateChange, **_type: str) -> None:
            if state_change is ServiceStateChange.Removed:
                sightings.forget(name)
            else:
                _hear(sightings, zeroconf, name)

        self._browser = ServiceBrowser(self._zeroconf, SERVICE, handlers=[heard])
        self._looked_s = time.monotonic()
        self._lock = threading.Lock()
        self._announced: list[_Announcement] = []
        self._here = local_addresses(_ANY)
        self._over = threading.Event()
        threading.Thread(target=self._watch, name="addresses", daemon=True).start()

    @property
    def names(self) -> frozenset[str]:
        """Return the names of the members that announced themselves."""
        return self._sightings.names

    def find(self, name: str) -> tuple[Address, ...]:
        """Return addresses as `Sightings.find` does.

        If there are none yet, it judges the heard announcements again, every few seconds at most: in a
        flood, a member's announcement may have been over the rate.
        """
        found = self._sightings.find(name)
        if found or time.monotonic() - self._looked_s < _LOOK_AGAIN_S:
            return found
        self._looked_s = time.monotonic()
        self.hear_again()
        return self._sightings.find(name)

    def announce(self, identity_key: bytes, bound: Address) -> Callable[[], None]:
        """Announce that a member with this key listens at ``bound``. Returns a function that withdraws it."""
        own = _Announcement(identity_key, bound, make_info(identity_key, bound))
        self._zeroconf.register_service(own.info, strict=False)
        with self._lock:
            self._announced.append(own)

        def withdraw() -> None:
            with self._lock:
                self._announced.remove(own)
                self._zeroconf.unregister_service(own.info)

        return withdraw

    def look_around(self) -> None:
        """Announce this machine's new addresses, if it has any: a laptop may wake in another network.

        The announcement has another name and salt, and the old one ends without a goodbye. So no listener of
        both networks sees that it is the same machine.
        """
        here = local_addresses(_ANY)
        if here == self._here:
            return
        with self._lock:
            self._zeroconf.update_interfaces()
            for own in self._announced:
                loop = self._zeroconf.loop
                assert loop is not None, "it was started"
                loop.call_soon_threadsafe(self._zeroconf.registry.async_remove, own.info)
                own.info = make_info(own.identity_key, own.bound)
                self._zeroconf.register_service(own.info, strict=False)
        self._here = here
        _log.info("this machine has other addresses than before")

    def _watch(self) -> None:
        while not self._over.wait(_LOOK_AGAIN_S):
            try:
                self.look_around()
            except Exception as error:  # noqa: BLE001 - tried again; the network may be going away just now
                _log.debug("the addresses could not be announced: %s", type(error).__name__)

    def hear_again(self) -> None:
        """Judge earlier announcements again: under another roster one may be of a member."""
        for name in self._zeroconf.cache.names():
            if name.endswith(f".{SERVICE}"):
                _hear(self._sightings, self._zeroconf, name, again=True)

    def close(self) -> None:
        """Say goodbye and stop hearing. A second call does nothing."""
        self._over.set()
        self._zeroconf.close()


class DiscoveredNetwork:
    """Dial over TLS and TCP, first a member's address in the roster, then its announced ones.

    Raises `ConfigError` if the extra is not installed. mDNS starts with the first use.
    """

    def __init__(self, options: LinkOptions | None = None) -> None:
        require_zeroconf()
        self._lock = threading.Lock()
        self._discovery: Discovery | None = None
        self._unsubscribe: Callable[[], None] | None = None
        self._tcp = TcpNetwork(options, find=self._find)

    def dial(self, me: Membership, peer: Member, timeout_s: float) -> Link:
        self._start(me)
        return self._tcp.dial(me, peer, timeout_s)

    def listen(self, me: Membership, bind: Address, on_link: OnLink) -> Listening:
        discovery = self._start(me)
        listening = self._tcp.listen(me, bind, on_link)
        try:
            return _Announced(listening, discovery.announce(me.member.identity_key, listening.address))
        except BaseException:
            listening.close()
            raise

    def close(self) -> None:
        """Stop hearing. Links and listeners belong to their owners."""
        with self._lock:
            discovery, self._discovery = self._discovery, None
        if self._unsubscribe is not None:
            self._unsubscribe()
        if discovery is not None:
            discovery.close()

    def _start(self, me: Membership) -> Discovery:
        with self._lock:
            if self._discovery is None:
                started = self._discovery = Discovery(lambda: me.roster.members)
                # A member that is new in the roster may have announced itself before.
                self._unsubscribe = me.subscribe(lambda _roster: started.hear_again())
            return self._discovery

    def _find(self, name: str) -> tuple[Address, ...]:
        discovery = self._discovery
        return () if discovery is None else discovery.find(name)


class _Announced:
    """Withdraw the announcement of a listener before it closes."""

    def __init__(self, listening: Listening, withdraw: Callable[[], None]) -> None:
        self._listening = listening
        self._withdraw = withdraw
        self.address = listening.address

    def close(self) -> None:
        try:
            self._withdraw()
        except Exception as error:  # noqa: BLE001 - a goodbye that fails must not keep the listener open
            _log.warning("the announcement could not be taken back: %s", type(error).__name__)
        self._listening.close()


def _hear(sightings: Sightings, zeroconf: Zeroconf, name: str, *, again: bool = False) -> None:
    """Note an announcement on the library's thread.

    It must be complete, or it is ignored. This process never asks back: otherwise an announcement could
    make it ask, and wait, as often as it likes.
    """
    from zeroconf import IPVersion, ServiceInfo

    info = ServiceInfo(SERVICE, name)
    info.load_from_cache(zeroconf)
    if info.port is not None:
        hosts = info.parsed_scoped_addresses(IPVersion.All)[: 2 * MAX_ADDRESSES]
        sightings.judge(name, info.properties, [(host, info.port) for host in hosts], again=again)


def require_zeroconf() -> None:
    """Raise `ConfigError` if the extra is not installed."""
    try:
        import zeroconf  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "discovery needs the package zeroconf, which is not installed",
            hint="pip install 'WHEEL[discovery]', or leave discover out of the [listen] section",
        ) from error


def _start_zeroconf() -> Zeroconf:
    require_zeroconf()
    from zeroconf import IPVersion, Zeroconf

    failed: OSError | None = None
    # Machines without IPv6 refuse the first version.
    for version in (IPVersion.All, IPVersion.V4Only):
        try:
            return Zeroconf(ip_version=version)
        except OSError as error:
            failed = error
    assert failed is not None
    reason = (failed.strerror or type(failed).__name__).lower()
    raise ConfigError(
        f"discovery cannot use the local network: {reason}",
        hint="does this machine have a network with multicast? static addresses work without it",
    ) from failed


def make_info(identity_key: bytes, bound: Address) -> ServiceInfo:
    """Return an announcement under a random name, which only members with the roster can tell from noise."""
    from zeroconf import ServiceInfo

    salt = os.urandom(SALT_BYTES)
    return ServiceInfo(
        SERVICE,
        f"{secrets.token_hex(8)}.{SERVICE}",
        addresses=[ipaddress.ip_address(host).packed for host in local_addresses(bound[0])],
        port=bound[1],
        properties={b"s": salt, b"f": fingerprint(salt, identity_key)},
        server=f"{secrets.token_hex(8)}.local.",
    )


def local_addresses(bound: str) -> list[str]:
    """Return the addresses of a socket bound to ``bound``: itself, or for a wildcard those of this machine.

    Loopback addresses are included only if there are no others. IPv6 scopes are left out, because they
    have no meaning elsewhere.
    """
    address = ipaddress.ip_address(bound.partition("%")[0])
    if not address.is_unspecified:
        return [str(address)]
    # The package comes with zeroconf.
    import ifaddr

    every = []
    for adapter in ifaddr.get_adapters():
        for ip in adapter.ips:
            every.append(ip.ip if isinstance(ip.ip, str) else ip.ip[0])
    reachable = [host for host in every if address.version == 6 or ipaddress.ip_address(host).version == 4]
    outside = [host for host in reachable if not ipaddress.ip_address(host).is_loopback]
    return list(dict.fromkeys(outside or reachable))


def _usable(addresses: Iterable[Address]) -> Iterator[Address]:
    num_usable = 0
    for host, port in addresses:
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(host)
            nobody = address.is_unspecified or address.is_multicast
            if not nobody and 0 < port < 2**16 and num_usable < MAX_ADDRESSES:
                num_usable += 1
                yield str(address), port
