"""Read a policy, which is a verifier's demands on the members that it works with, from a TOML file.

    [attestation]
    minimum = "hardware"            # none, self_signed or hardware; a member below it gets no stage
    interval_s = 300.0              # every running member is asked again this often
    deadline_s = 15.0               # evidence that comes later counts as none

    [attestation.software]          # what a member must say of itself: "same" as here, or a list of values
    package = "same"
    torch = ["2.13.0", "2.13.0+cpu"]

    [attestation.tpm]
    authorities = ["vendor-root.pem"]   # where chains of endorsement certificates must end (enrolment only)
    require_pcrs = true                 # a member that no [[pcr]] row is about is no `hardware`

    [[attestation.pcr]]             # SHA-256 bank; without members: of every member
    index = 7
    values = ["<64 hex digits>"]
    members = ["beta"]

    [[placement]]
    keep = ["embedding", "output", "first:2", "last:2"]
    on = "hardware"                 # or members = ["alpha", "beta"]

    [[offer]]                       # without members: of every member but the head
    max_memory_gb = 24.0            # of what a member offers no more counts
    members = ["beta"]

Everything is optional. An unknown field is refused, never passed over: a demand that is mistyped must not be
a demand that is not made. `Policy.check_members` refuses unknown names of members for the same reason. The
file is read by its owner's process from its own disk; nothing of it is sent.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from convoy.errors import ConfigError
from convoy.trust.evidence.level import Level
from convoy.wire.messages.control import MAX_OFFER_BYTES

_KEYS = "docs/attestation.md has the keys of a policy and their values"

MAX_POLICY_BYTES = 256 * 1024
MAX_ROWS = 1024
NUM_PCRS = 24
SAME = "same"
SOFTWARE = ("package", "model", "python", "torch", "transformers", "cryptography", "convoy", "platform")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"(first|last):([1-9][0-9]{0,3})")
_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.5, 86_400.0
_MAX_TEXT = 255


@dataclass(frozen=True, slots=True)
class SoftwareRule:
    """Hold the values that a claim may have. Empty ``values`` mean the verifier's own."""

    claim: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PcrRule:
    """Hold the values (32 bytes each) that one register of the SHA-256 bank may have.

    No members means all.
    """

    index: int
    values: tuple[bytes, ...]
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """Keep parts of a model on members of ``level`` or above, or on the named ones.

    Exactly one of ``level`` and ``members`` is set.
    """

    embedding: bool
    output: bool
    first_layers: int
    last_layers: int
    level: Level | None
    members: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OfferRule:
    """Limit the memory that a member's offer counts for. No members means every member but the head."""

    max_memory_bytes: int
    members: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Policy:
    """Hold the whole file. The defaults are those of no file: levels are reported and nothing is demanded."""

    minimum: Level = Level.NONE
    interval_s: float = 300.0
    deadline_s: float = 15.0
    software: tuple[SoftwareRule, ...] = ()
    authorities: tuple[str, ...] = ()
    require_pcrs: bool = False
    pcrs: tuple[PcrRule, ...] = ()
    placement: tuple[PlacementRule, ...] = ()
    offers: tuple[OfferRule, ...] = ()

    def capped(self, member: str, memory_bytes: int, *, head: bool) -> int:
        """Return how much of the ``memory_bytes`` that ``member`` offers counts: the least of its rules."""
        limits = [
            rule.max_memory_bytes
            for rule in self.offers
            if (member in rule.members if rule.members else not head)
        ]
        return min([memory_bytes, *limits])

    def check_members(self, names: Collection[str]) -> None:
        """Raise `ConfigError` if a rule names a member that is not one of ``names``."""
        tables: dict[str, tuple[PcrRule | PlacementRule | OfferRule, ...]]
        tables = {"attestation.pcr": self.pcrs, "placement": self.placement, "offer": self.offers}
        for table, rules in tables.items():
            for number, rule in enumerate(rules, start=1):
                for name in rule.members:
                    if name not in names:
                        raise ConfigError(
                            f"the policy's [[{table}]] rule {number} names {name}, which is no member",
                            hint=f"the members are {', '.join(names)}; mend the name in the policy",
                        )

    def pcrs_of(self, member: str) -> tuple[PcrRule, ...]:
        """Return the rules that one member must meet."""
        return tuple(rule for rule in self.pcrs if not rule.members or member in rule.members)


def parse_policy(data: bytes, what: str = "the policy") -> Policy:
    """Read a policy file. Raises `ConfigError` naming ``what`` and the field."""
    if len(data) > MAX_POLICY_BYTES:
        raise ConfigError(f"{what} has {len(data)} bytes, and the limit is {MAX_POLICY_BYTES}", hint=_KEYS)
    try:
        tables = tomllib.loads(data.decode())
    except (ValueError, RecursionError):
        # ValueError includes TOMLDecodeError, and the error of int() for a number of 4,301 digits.
        raise ConfigError(f"{what} is not TOML", hint=_KEYS) from None
    try:
        return _policy(_Table(tables, ""))
    except ConfigError as error:
        raise ConfigError(f"{what}: {error.message}", hint=error.hint) from None


class _Table:
    """Take a table's fields one by one; `end` refuses those that are left."""

    def __init__(self, table: object, name: str) -> None:
        if not isinstance(table, Mapping):
            raise ConfigError(f"{name} is no table", hint=_KEYS)
        self._left = dict(table)
        self.name = name

    def take(self, key: str, kind: type, default: Any) -> Any:
        value = self._left.pop(key, default)
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        # A bool is an int to isinstance.
        if type(value) is not kind:
            raise ConfigError(
                f"{self.path(key)} is a {type(value).__name__}, expected {kind.__name__}", hint=_KEYS
            )
        return value

    def texts(self, key: str, default: list[str] | None = None) -> tuple[str, ...]:
        values = self.take(key, list, [] if default is None else default)
        if len(values) > MAX_ROWS or not all(type(v) is str and 0 < len(v) <= _MAX_TEXT for v in values):
            raise ConfigError(f"{self.path(key)} is not a list of at most {MAX_ROWS} texts", hint=_KEYS)
        return tuple(values)

    def is_text(self, key: str) -> bool:
        """Return whether the field ``key`` is given, and is a text."""
        return type(self._left.get(key)) is str

    def names(self, key: str) -> tuple[str, ...]:
        given = key in self._left
        names = self.texts(key)
        if given and not names:
            raise ConfigError(f"{self.path(key)} names no member", hint=_KEYS)
        for name in names:
            if not _NAME.fullmatch(name):
                raise ConfigError(f"{self.path(key)}: {name[:63]!r} cannot name a member", hint=_KEYS)
        return names

    def table(self, key: str) -> _Table:
        return _Table(self._left.pop(key, {}), self.path(key))

    def rows(self, key: str) -> list[_Table]:
        rows = self.take(key, list, [])
        if len(rows) > MAX_ROWS:
            raise ConfigError(
                f"{self.path(key)} has {len(rows)} rows, and the limit is {MAX_ROWS}", hint=_KEYS
            )
        return [_Table(row, f"{self.path(key)} {number}") for number, row in enumerate(rows, start=1)]

    def keys(self) -> list[str]:
        return sorted(self._left)

    def path(self, key: str) -> str:
        return f"{self.name}: {key}" if self.name else key

    def end(self) -> None:
        for key in self.keys():
            raise ConfigError(f"{self.path(key[:63])} is unknown", hint=_KEYS)


def _policy(tables: _Table) -> Policy:
    attestation = tables.table("attestation")
    tpm = attestation.table("tpm")
    policy = Policy(
        minimum=_level(attestation, "minimum", Level.NONE.text),
        interval_s=_seconds(attestation, "interval_s", Policy().interval_s),
        deadline_s=_seconds(attestation, "deadline_s", Policy().deadline_s),
        software=_software(attestation.table("software")),
        authorities=tpm.texts("authorities"),
        require_pcrs=tpm.take("require_pcrs", bool, False),
        pcrs=tuple(_pcr(row) for row in attestation.rows("pcr")),
        placement=tuple(_placement(row) for row in tables.rows("placement")),
        offers=tuple(_offer(row) for row in tables.rows("offer")),
    )
    for table in (tpm, attestation, tables):
        table.end()
    return policy


def _level(table: _Table, key: str, default: str) -> Level:
    try:
        return Level.from_text(table.take(key, str, default))
    except ValueError as error:
        raise ConfigError(f"{table.path(key)}: {error}", hint=_KEYS) from None


def _seconds(table: _Table, key: str, default: float) -> float:
    value: float = table.take(key, float, default)
    # The comparison is false for NaN too.
    if not _MIN_INTERVAL_S <= value <= _MAX_INTERVAL_S:
        raise ConfigError(
            f"{table.path(key)} is {value:g}, expected {_MIN_INTERVAL_S:g} to {_MAX_INTERVAL_S:g} seconds",
            hint=_KEYS,
        )
    return value


def _software(table: _Table) -> tuple[SoftwareRule, ...]:
    rules = []
    for claim in table.keys():  # noqa: SIM118 - a list that stays while fields are taken
        if claim not in SOFTWARE:
            raise ConfigError(f"{table.path(claim[:63])} is unknown", hint=f"known are {', '.join(SOFTWARE)}")
        if table.is_text(claim):
            if table.take(claim, str, "") != SAME:
                raise ConfigError(
                    f'{table.path(claim)} is a text, expected "{SAME}" or a list of texts', hint=_KEYS
                )
            rules.append(SoftwareRule(claim, ()))
            continue
        values = table.texts(claim)
        if not values:
            raise ConfigError(f"{table.path(claim)} allows nothing", hint=_KEYS)
        rules.append(SoftwareRule(claim, values))
    return tuple(rules)


def _pcr(row: _Table) -> PcrRule:
    index = row.take("index", int, -1)
    if not 0 <= index < NUM_PCRS:
        raise ConfigError(f"{row.path('index')} is not there or not 0 to {NUM_PCRS - 1}", hint=_KEYS)
    values = row.texts("values")
    if not values or not all(_DIGEST.fullmatch(value) for value in values):
        raise ConfigError(
            f"{row.path('values')} is not a list of SHA-256 digests, 64 lower-case hex digits", hint=_KEYS
        )
    rule = PcrRule(index, tuple(bytes.fromhex(value) for value in values), row.names("members"))
    row.end()
    return rule


def _offer(row: _Table) -> OfferRule:
    gigabytes: float = row.take("max_memory_gb", float, 0.0)
    # The comparison is false for NaN too.
    if not 0 < gigabytes <= MAX_OFFER_BYTES / 1e9:
        raise ConfigError(
            f"{row.path('max_memory_gb')} is {gigabytes:g}, expected more than 0 and at most "
            f"{MAX_OFFER_BYTES / 1e9:.0f}",
            hint=_KEYS,
        )
    rule = OfferRule(max(1, int(gigabytes * 1e9)), row.names("members"))
    row.end()
    return rule


def _placement(row: _Table) -> PlacementRule:
    keep = row.texts("keep")
    layers = {"first": 0, "last": 0}
    for part in keep:
        match = _PART.fullmatch(part)
        if match is not None:
            layers[match[1]] = max(layers[match[1]], int(match[2]))
        elif part not in {"embedding", "output"}:
            raise ConfigError(
                f"{row.path('keep')}: {part[:63]!r} is unknown, expected embedding, output, first:N or "
                "last:N",
                hint=_KEYS,
            )
    if not keep:
        raise ConfigError(f"{row.path('keep')} keeps nothing", hint=_KEYS)
    level = _level(row, "on", Level.HARDWARE.text) if "on" in row.keys() else None  # noqa: SIM118
    members = row.names("members")
    _check_place(row, level, members)
    row.end()
    return PlacementRule(
        "embedding" in keep, "output" in keep, layers["first"], layers["last"], level, members
    )


def _check_place(row: _Table, level: Level | None, members: tuple[str, ...]) -> None:
    if (level is None) == (not members):
        raise ConfigError(f"{row.name} needs one of `on` and `members`, and not both", hint=_KEYS)
    if level is not None and level < Level.HARDWARE:
        raise ConfigError(
            f"{row.path('on')} is {level.text}, which keeps nothing where it belongs",
            hint='self_signed detects drift, not malice; say on = "hardware", or name members',
        )
