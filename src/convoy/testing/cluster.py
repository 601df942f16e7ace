"""A served model whose members are threads of this process, linked by memory, with faults on demand."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

from convoy.api.listen.options import ServeOptions
from convoy.cluster.options import HeadOptions, MemberOptions, PeerOptions
from convoy.cluster.peer.peer import Peer
from convoy.cluster.running import RunningCluster
from convoy.crypto.identity import Identity, OperatorKey
from convoy.model.checkpoints.source import ModelSource
from convoy.sdk.head import service_of
from convoy.sdk.names import local_names
from convoy.sdk.server import Server, http_server
from convoy.testing.network import MemoryNetwork
from convoy.testing.script import Script
from convoy.testing.streams import Fault
from convoy.transport.member import LocalMember
from convoy.transport.membership import Membership
from convoy.trust.roster.authority import OperatorAuthority
from convoy.trust.roster.card import member_of
from convoy.trust.roster.roster import make_roster, sign_roster

_MEMORY_BYTES = 1 << 31
_FIRST_PORT = 7000
_WAIT_S = 60.0


@contextmanager
def serve(
    model: str = "demo-mini",
    *,
    members: int = 2,
    faults: Mapping[tuple[str, str], Iterable[Fault]] | None = None,
    num_threads: int = 1,
    script: Script | None = None,
) -> Iterator[Server]:
    """Yield what `convoy.serve` returns, with members alpha, beta, ... as threads and no link on a socket.

    ``faults`` are those of the first link that one member dials to another: {("alpha", "beta"): [Cut(at=40)]}
    ends it at write 40. Later links have none. With a ``script``, the model answers what that says. Raises
    the errors of `convoy.serve`.
    """
    source = ModelSource.resolve(model)
    network = MemoryNetwork()
    # A link takes all faults of its iterator, so the next one finds none.
    network.faults.update({pair: iter(list(given)) for pair, given in (faults or {}).items()})
    member = MemberOptions(num_threads=num_threads, memory_bytes=_MEMORY_BYTES)
    with ExitStack() as stack:
        head, *peers = _memberships(local_names(members))
        for me in peers:
            stack.enter_context(_peer(me, PeerOptions(member, model_path=source.path), network))
        cluster = RunningCluster.start(head, source, HeadOptions(member, wait_s=_WAIT_S), network=network)
        stack.callback(cluster.close)
        service = service_of(cluster) if script is None else script.serve(service_of(cluster))
        url = stack.enter_context(http_server(service, ServeOptions(port=0)))
        with Server(cluster, url, ExitStack()) as server:
            yield server


def _memberships(names: Iterable[str]) -> list[Membership]:
    """Return members of one new roster, the head first. Their keys exist in memory alone."""
    operator = OperatorKey.generate()
    identities = {name: Identity.generate() for name in names}
    roster = make_roster(
        "testing",
        [
            member_of(name, identity, ("127.0.0.1", _FIRST_PORT + index), head=index == 0)
            for index, (name, identity) in enumerate(identities.items())
        ],
    )
    signed = sign_roster(roster, operator)
    return [
        Membership(LocalMember(name, identity, roster), signed, OperatorAuthority(operator.public_key))
        for name, identity in identities.items()
    ]


@contextmanager
def _peer(me: Membership, options: PeerOptions, network: MemoryNetwork) -> Iterator[None]:
    peer = Peer(me, options, lambda _event: None, network)
    thread = threading.Thread(target=peer.run, args=(me.current.member.address,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        peer.stop()
        thread.join()
