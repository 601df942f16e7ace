"""The members of a plan: those of a roster, named ones, or devices of machines that do not run yet."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from convoy.config.files import read_bytes
from convoy.config.settings import Config
from convoy.errors import ConfigError, UsageError
from convoy.sdk.names import MAX_LOCAL_MEMBERS, local_names, spans_by_name
from convoy.sdk.options import Note, load_policy, unheard

if TYPE_CHECKING:
    from convoy.cluster.status import ClusterStatus, StageStatus
    from convoy.plan.offer import MemberOffer
    from convoy.plan.report import ExcludedReport
    from convoy.trust.evidence.level import Level
    from convoy.trust.evidence.policy import Policy

# Names with bytes; None shares out this machine's memory.
Members = tuple[tuple[str, int | None], ...]

_REMEDY = "--level beta=hardware"
_DEVICE_REMEDY = "--device alpha=cuda:24GB --device beta=cpu:16GB"
_DEVICE = re.compile(r"(?P<name>[^=:]+)=(?P<kind>[^=:]+):(?P<size>[^=:]+)", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", re.ASCII)
_KINDS = ("cpu", "mlx", "cuda")
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?|\.[0-9]{1,9}", re.ASCII)
# More than any machine has.
_MAX_GB = 1_000_000


@dataclasses.dataclass(frozen=True)
class PlannedDevice:
    """Describe the device, ``cpu``, ``mlx`` or ``cuda``, and memory of a machine that need not run yet."""

    name: str
    kind: str
    num_bytes: int

    @property
    def offered_bytes(self) -> int:
        """Return the part of the memory that a member with nothing else on the device would offer."""
        from convoy.plan.memory.memory import CUDA_MEMORY_SHARE, MEMORY_SHARE

        return int(self.num_bytes * (CUDA_MEMORY_SHARE if self.kind == "cuda" else MEMORY_SHARE))


def parse_gb(text: str, *, unit_needed: bool = False) -> int | None:
    """Return the bytes of ``16`` or ``16GB``; None for a text that is no size from 1 B to 1,000,000 GB."""
    has_unit = text[-2:].upper() == "GB"
    number = text[:-2].rstrip() if has_unit else text
    if _NUMBER.fullmatch(number) is None or (unit_needed and not has_unit):
        return None
    size = round(float(number) * 10**9)
    return size if 1 <= size <= _MAX_GB * 10**9 else None


def parse_devices(texts: Sequence[str]) -> tuple[PlannedDevice, ...]:
    """Parse ``NAME=cuda:24GB`` and ``NAME=cpu:16GB``. Raises UsageError naming the text that is none."""
    found: dict[str, PlannedDevice] = {}
    for text in texts:
        match = _DEVICE.fullmatch(text)
        if match is None or _NAME.fullmatch(match["name"]) is None:
            raise UsageError(
                f"--device is {text[:80]!r}, expected NAME=cuda:24GB, NAME=mlx:16GB or NAME=cpu:16GB",
                hint=_DEVICE_REMEDY,
            )
        name, kind = match["name"], match["kind"]
        if kind not in _KINDS:
            raise UsageError(
                f"--device {name} is on {kind[:40]!r}, expected {' or '.join(_KINDS)}", hint=_DEVICE_REMEDY
            )
        size = parse_gb(match["size"], unit_needed=True)
        if size is None:
            raise UsageError(
                f"--device {name} has {match['size'][:40]!r}, expected a number and GB, above 0GB and "
                f"up to {_MAX_GB}GB",
                hint=_DEVICE_REMEDY,
            )
        if name in found:
            raise UsageError(f"--device names {name} twice", hint="give each machine a name of its own")
        found[name] = PlannedDevice(name, kind, size)
    if len(found) > MAX_LOCAL_MEMBERS:
        raise UsageError(f"--device is given {len(found)} times, expected at most {MAX_LOCAL_MEMBERS}")
    return tuple(found.values())


@dataclasses.dataclass(frozen=True)
class MembersQuestion:
    """Hold what tells the members of a plan: texts are as the flags of ``convoy plan`` take them.

    Without ``devices`` and ``members``, the roster of the settings counts, otherwise two members here.
    """

    settings: Config
    members: Members | None = None
    devices: Sequence[str] = ()
    layers: Sequence[str] | None = None
    policy: Path | None = None
    levels: Sequence[str] = ()
    standbys: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class PlanMembers:
    """Hold the offers of the members with a stage, and all that the others need to be named.

    ``kinds`` has the kind of each device that does not run yet, by name.
    """

    offers: list[MemberOffer]
    standbys: list[str]
    left_out: list[ExcludedReport]
    spans: Mapping[str, str] | None
    demands: Policy
    kinds: Mapping[str, str]
    # The hosts of the members of a roster, by name. Members of one host share its memory and its cores.
    hosts: Mapping[str, str] = dataclasses.field(default_factory=dict)


def find_members(question: MembersQuestion, note: Note) -> PlanMembers:
    """Return the members of a plan. Raises UsageError or ConfigError for texts that make no sense."""
    settings = question.settings
    devices = parse_devices(question.devices)
    if devices and question.members is not None:
        raise UsageError(
            "--members and --device both name the members", hint="give --device alone, once for each machine"
        )
    demands = load_policy(question.policy or settings.cluster.policy)
    is_roster = not devices and question.members is None and settings.cluster.roster is not None
    hosts = _roster_hosts(settings) if is_roster else {}
    offered = _planned(devices, note) if devices else _offers(settings, question.members, hosts, note)
    offers = _with_levels(offered, question.levels)
    demands.check_members([offer.name for offer in offers])
    # The policy comes before the placement: memory beyond its cap must not attract layers.
    offers = _capped(offers, demands, note)
    offers, standbys = _without_standbys(settings, offers, list(question.standbys))
    own = None if devices else settings.plan.layers
    spans = spans_by_name(question.layers, [offer.name for offer in offers]) or own
    offers, left_out = _above(demands.minimum, offers)
    kinds = {device.name: device.kind for device in devices}
    return PlanMembers(offers, standbys, left_out, spans, demands, kinds, hosts)


def members_of(
    status: ClusterStatus, policy: Path | None = None, *, own: Collection[str] = (), note: Note = unheard
) -> PlanMembers:
    """Return the members that hold layers of a running cluster, with the memory that they offer.

    The memory of idle members and of standbys is unknown here, so they are left out. ``own`` are addresses of
    this machine, if the cluster's head runs on it.
    """
    from convoy.plan.offer import MemberOffer

    stages = {stage.member: stage for stage in status.stages}
    offered = _counted_once(list(stages.values()), own, note)
    offers = [
        MemberOffer(name, offered[name], stage.head)
        for name, stage in sorted(stages.items(), key=lambda one: not one[1].head)
    ]
    kinds = {name: re.split("[:,+ ]", stage.device)[0] for name, stage in stages.items()}
    kinds = {name: kind if kind in _KINDS else _KINDS[0] for name, kind in kinds.items()}
    return PlanMembers(offers, [], [], None, load_policy(policy), kinds)


def _counted_once(stages: Sequence[StageStatus], own: Collection[str], note: Note) -> dict[str, int]:
    """Return the memory that each member offers, with the memory of a machine or card counted once.

    Members that were granted no memory each offered all that was free when they started. Only for this
    machine it is known how much they can have together; for another it is the largest offer.
    """
    together: dict[tuple[str, str], list[StageStatus]] = {}
    for stage in stages:
        host = stage.address.rpartition(":")[0].strip("[]")
        together.setdefault((host or stage.member, stage.device), []).append(stage)
    counted: dict[str, int] = {}
    for (host, device), sharing in together.items():
        total = sum(stage.memory_bytes for stage in sharing)
        most = max(stage.memory_bytes for stage in sharing)
        if host in own and device in {"", _KINDS[0]}:
            held = sum(stage.weight_bytes + stage.kv_bytes for stage in sharing)
            most = max(most, _shared_bytes(held))
        if len(sharing) > 1 and total > most:
            names = " and ".join(stage.member for stage in sharing)
            note(f"{names} share the machine at {host}: its memory counts once")
        counted |= {stage.member: stage.memory_bytes * min(total, most) // max(1, total) for stage in sharing}
    return counted


def _shared_bytes(held_bytes: int) -> int:
    """Return what this machine's members could offer together if they did not hold ``held_bytes``."""
    from convoy.plan.memory.free import free_bytes, total_bytes
    from convoy.plan.memory.memory import MEMORY_SHARE

    return int(min(total_bytes(), free_bytes() + held_bytes) * MEMORY_SHARE)


def _planned(devices: Sequence[PlannedDevice], note: Note) -> list[MemberOffer]:
    from convoy.plan.memory.memory import format_bytes
    from convoy.plan.offer import MemberOffer

    for device in devices:
        whole, counted = format_bytes(device.num_bytes), format_bytes(device.offered_bytes)
        note(f"{device.name}: {device.kind} with {whole}, of which {counted} count")
    return [
        MemberOffer(device.name, device.offered_bytes, index == 0) for index, device in enumerate(devices)
    ]


def _without_standbys(
    settings: Config, offers: list[MemberOffer], standbys: list[str]
) -> tuple[list[MemberOffer], list[str]]:
    """Return the members with a stage from the start, and the names of the standbys. Raises UsageError."""
    names = [offer.name for offer in offers]
    own = settings.cluster.name
    if settings.cluster.standby and own in names:
        standbys = [*standbys, own]
    for name in standbys:
        if name not in names:
            raise UsageError(f"--standby is {name}, expected a member: {', '.join(names)}")
        if next(offer for offer in offers if offer.name == name).head:
            raise UsageError(
                f"--standby is {name}, which is the head: it always has a stage",
                hint="leave this --standby out",
            )
    waiting = [name for name in names if name in standbys]
    return [offer for offer in offers if offer.name not in waiting], waiting


def _with_levels(offers: list[MemberOffer], levels: Sequence[str]) -> list[MemberOffer]:
    """Return the offers with the levels of ``--level``. A plan asks no member for evidence. Raises
    UsageError.
    """
    from convoy.trust.evidence.level import Level

    names = [offer.name for offer in offers]
    supposed: dict[str, Level] = {}
    for text in levels:
        name, equals, word = text.partition("=")
        if not equals or name not in names:
            raise UsageError(
                f"--level {text} names no member, expected NAME=LEVEL for {', '.join(names)}", hint=_REMEDY
            )
        try:
            supposed[name] = Level.from_text(word)
        except ValueError as error:
            raise UsageError(f"--level {text}: {error}", hint=_REMEDY) from None
    return [dataclasses.replace(offer, level=supposed.get(offer.name, offer.level)) for offer in offers]


def _capped(offers: list[MemberOffer], demands: Policy, note: Note) -> list[MemberOffer]:
    """Return the offers with at most the memory that the policy allows."""
    from convoy.plan.memory.memory import format_bytes

    found = []
    for offer in offers:
        counted = demands.capped(offer.name, offer.memory_bytes, head=offer.head)
        if counted < offer.memory_bytes:
            offered = format_bytes(offer.memory_bytes)
            note(f"{offer.name} offers {offered}, and the policy lets {format_bytes(counted)} count")
        found.append(dataclasses.replace(offer, memory_bytes=counted))
    return found


def _above(minimum: Level, offers: list[MemberOffer]) -> tuple[list[MemberOffer], list[ExcludedReport]]:
    """Return the members that may have a stage, and a report on each excluded peer.

    The head always may, because it is the judge. A peer needs at least the minimum level.
    """
    from convoy.plan.report import ExcludedReport

    out = [offer for offer in offers if not offer.head and offer.level < minimum]
    reports = [
        ExcludedReport(
            offer.name,
            offer.level.text,
            f"{offer.name} has {offer.level.text}, and the policy's minimum is {minimum.text}",
        )
        for offer in out
    ]
    return [offer for offer in offers if offer not in out], reports


def _offers(
    settings: Config, members: Members | None, hosts: Mapping[str, str], note: Note
) -> list[MemberOffer]:
    """Return the ``members``, otherwise those of ``hosts``, by name, otherwise two.

    The memory of other members is unknown before they answer.
    """
    from convoy.plan.offer import MemberOffer

    if hosts:
        if len(hosts) > 1:
            note(
                "memory of the other members is unknown: each machine is assumed to have as much as this one"
            )
        beside = Counter(hosts.values())
        for host in [host for host, count in beside.items() if count > 1]:
            sharing = " and ".join(name for name in hosts if hosts[name] == host)
            note(f"{sharing} share the machine at {host}: its memory and its cores count once")
        free = _memory_bytes(settings)
        # What the configuration grants is for a member, and free memory is the machine's.
        granted = bool(settings.model.memory_gb)
        return [
            MemberOffer(name, free if granted else free // beside[host], index == 0)
            for index, (name, host) in enumerate(hosts.items())
        ]
    listed = members or tuple((name, None) for name in local_names(2))
    share = _memory_bytes(settings) // len(listed)
    return [MemberOffer(name, size or share, index == 0) for index, (name, size) in enumerate(listed)]


def _roster_hosts(settings: Config) -> dict[str, str]:
    """Return the hosts of the members in the roster by name, head first.

    The head is this member if the roster allows it, otherwise the first member that may be head.
    """
    from convoy.trust.roster.roster import MAX_ROSTER_BYTES, open_roster

    data = read_bytes(settings.require_roster(), max_bytes=MAX_ROSTER_BYTES)
    roster = open_roster(data, operator_key=settings.require_operator_key()).roster
    heads = [member.name for member in roster.members if member.head]
    head = settings.cluster.name if settings.cluster.name in heads else heads[0]
    hosts = {member.name: member.address[0] for member in roster.members}
    return {head: hosts.pop(head), **hosts}


def _memory_bytes(settings: Config) -> int:
    """Return the memory granted in [model], or the share of free memory that a member would offer."""
    from convoy.plan.memory.free import free_bytes, total_bytes
    from convoy.plan.memory.memory import MEMORY_SHARE

    granted = int(settings.model.memory_gb * 10**9)
    if granted > total_bytes():
        raise ConfigError(
            f"[model] memory_gb is {settings.model.memory_gb:g}, more than this machine has",
            hint="lower memory_gb, or leave it out: then the free memory counts",
        )
    return granted or int(free_bytes() * MEMORY_SHARE)
