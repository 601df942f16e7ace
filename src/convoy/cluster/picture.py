"""The stages of a running plan as they are shown: each with its member's address, proof and link."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from convoy.cluster.granted import Granted
from convoy.cluster.status import StageStatus
from convoy.errors import LinkClosed, PeerError
from convoy.transport.link import Link
from convoy.transport.member import Roster


def describe_stages(
    granted: Granted,
    head: str,
    roster: Roster,
    links: Mapping[str, Link],
    levels: Mapping[str, str],
    *,
    devices: Mapping[str, str],
) -> list[StageStatus]:
    """In the ring's order, with a fresh round trip to each member that ``links`` has.

    ``levels``: what was proved of each. ``devices``: of those that are here.
    """
    shown = []
    for position, stage in enumerate(granted.plan.stages):
        name, link = stage.member, links.get(stage.member)
        status = StageStatus(
            member=name,
            head=name == head,
            level=levels[name],
            start=stage.start,
            end=stage.end,
            embed=stage.embed,
            output=stage.output,
            weight_bytes=granted.weight_bytes[name],
            sees_token_ids=name in granted.placement.route.token_id_members,
            address=_address(roster, name),
            device=devices.get(name, ""),
            kernel=granted.plan.kernel_of(position),
        )
        shown.append(status if link is None else _with_link(status, link))
    return shown


def _with_link(status: StageStatus, link: Link) -> StageStatus:
    return msgspec.structs.replace(
        status,
        round_trip_s=_round_trip(link),
        cipher=link.cipher,
        link_id=None if link.is_over else link.link_id.hex(),
        sealed_bytes_sent=link.sent_sealed_bytes,
        sealed_bytes_received=link.received_sealed_bytes,
    )


def _address(roster: Roster, name: str) -> str:
    """Empty for a member that a newer roster took out: its stage is lost, and shown until a new plan."""
    found = [member.address for member in roster.members if member.name == name]
    return "{}:{}".format(*found[0]) if found else ""


def _round_trip(link: Link) -> float | None:
    try:
        return link.ping(timeout_s=1.0)
    except (PeerError, LinkClosed):
        return None  # shown as unknown: the engine is the one that reports a lost stage
