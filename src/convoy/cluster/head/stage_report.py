"""The stages of a running plan for `convoy status`: each with its member's address, evidence and link."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from weakref import WeakKeyDictionary

import msgspec

from convoy.cluster.active_plan import ActivePlan
from convoy.cluster.status import StageStatus
from convoy.errors import LinkClosed, PeerError
from convoy.plan.spec.sharding import share_of
from convoy.transport.link.link import Link
from convoy.transport.member import Roster
from convoy.wire.messages.control import Hello, StageAssignment


def describe_stages(
    active: ActivePlan,
    head: str,
    roster: Roster,
    links: Mapping[str, Link],
    levels: Mapping[str, str],
    *,
    hellos: Mapping[str, Hello],
    round_trip: Callable[[Link], float | None],
    origins: Callable[[str], dict[str, int]] = lambda _member: {},
) -> list[StageStatus]:
    """Return the stages in the ring's order, with the ``round_trip`` to each member in ``links``.

    ``levels`` has the proved level of each member, and ``hellos`` the offer of each connected one.
    ``origins`` returns how many bytes of weights a member got from each source.
    """
    shown = []
    places = [
        (position, stage, rank, name)
        for position, stage in enumerate(active.plan.stages)
        for rank, name in enumerate(stage.holders)
    ]
    for position, stage, rank, name in places:
        link, kernel = links.get(name), active.plan.kernel_of(position)
        num_bytes = active.weight_bytes[name]
        form = active.placement.forms[name]
        share = share_of(num_bytes, active.placement.spec, stage, form) if stage.world_size > 1 else 1.0
        hello = hellos.get(name)
        status = StageStatus(
            member=name,
            head=name == head,
            level=levels[name],
            start=stage.start,
            end=stage.end,
            embed=stage.embed,
            output=stage.output,
            weight_bytes=num_bytes,
            weight_share=round(share, 4),
            can_read_prompts=active.placement.route.reads_prompts(name),
            address=_address(roster, name),
            device="" if hello is None else hello.device,
            platform="" if hello is None else hello.platform,
            memory_bytes=0 if hello is None else hello.memory_bytes,
            kv_bytes=_kv_bytes(active, stage, kernel),
            fingerprint=_fingerprint(roster, name),
            kernel=kernel,
            unpacks=active.placement.unpacks(stage, name),
            weights_from=origins(name),
            rank=rank,
            world_size=stage.world_size,
        )
        shown.append(status if link is None else _with_link(status, link, round_trip(link)))
    return shown


def _with_link(status: StageStatus, link: Link, round_trip_s: float | None) -> StageStatus:
    return msgspec.structs.replace(
        status,
        round_trip_s=round_trip_s,
        cipher=link.cipher,
        keyed_unix_s=link.keyed_unix_s,
        link_id=None if link.is_over else link.link_id.hex(),
        sealed_bytes_sent=link.sent_sealed_bytes,
        sealed_bytes_received=link.received_sealed_bytes,
    )


def _kv_bytes(active: ActivePlan, stage: StageAssignment, kernel: str) -> int:
    """Return the bytes of the plan's K/V blocks at one rank of ``stage``. Ranks share the K/V heads."""
    sizes = (
        group.block_bytes(stage.start, stage.end, active.plan.block_size, kernel)
        for group in active.placement.spec.cache_groups
    )
    total = sum(size * count for size, count in zip(sizes, active.num_blocks, strict=True))
    return total // stage.world_size


def _fingerprint(roster: Roster, name: str) -> str:
    """Return the SHA-256 of a member's identity key; empty if a newer roster removed it."""
    keys = [member.identity_key for member in roster.members if member.name == name]
    return hashlib.sha256(keys[0]).hexdigest() if keys else ""


def _address(roster: Roster, name: str) -> str:
    """Return a member's address; empty if a newer roster removed it. Its stage is shown until a new plan."""
    found = [member.address for member in roster.members if member.name == name]
    return "{}:{}".format(*found[0]) if found else ""


class RoundTrips:
    """Measure the round trips of links, and keep the last one of each."""

    def __init__(self) -> None:
        self._last_s: WeakKeyDictionary[Link, float | None] = WeakKeyDictionary()

    def measure(self, link: Link) -> float | None:
        """Return a fresh round trip; None if there is no answer within a second."""
        found_s: float | None = None
        # An unanswered ping is shown as unknown. The engine reports a lost stage, not this report.
        with suppress(PeerError, LinkClosed):
            found_s = link.ping(timeout_s=1.0)
        self._last_s[link] = found_s
        return found_s

    def last(self, link: Link) -> float | None:
        """Return the last round trip; a fresh one if there is none."""
        return self._last_s[link] if link in self._last_s else self.measure(link)
