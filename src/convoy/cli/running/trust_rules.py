"""The table ``[evidence]`` of coordinator.toml and proxy.toml: the evidence that providers must show.

min_level     none, self_signed or hardware: the lowest level for a provider's weakest member
policy        a file in the form of a cluster's policy: software, and registers of TPMs
operators     keys of operators with rosters that assign TPMs to members
revoked       keys of providers and members that count for nothing
every_member  each member that the roster lists must have sent evidence
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from convoy.config.settings import decode_public_key
from convoy.errors import ConfigError
from convoy.sdk.options import load_policy

if TYPE_CHECKING:
    from convoy.trust.evidence.provider import ProviderRules

LevelName = Literal["none", "self_signed", "hardware"]
_Keys = Annotated[list[str], msgspec.Meta(max_length=1000)]


class EvidenceTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hold [evidence]."""

    min_level: LevelName = "none"
    policy: str | None = None
    operators: _Keys = []
    revoked: _Keys = []
    every_member: bool = False


def rules_of(
    table: EvidenceTable, file: Path | None, operators: frozenset[bytes] = frozenset()
) -> ProviderRules:
    """Return the rules of ``table``, which stands in ``file``. Trust ``operators`` in addition. Raises
    `ConfigError`.
    """
    from convoy.trust.evidence.level import Level
    from convoy.trust.evidence.provider import ProviderRules

    folder = Path() if file is None else file.parent
    policy = load_policy(None if table.policy is None else folder / table.policy)
    if policy.placement or policy.offers:
        kind = "placement" if policy.placement else "offer"
        raise ConfigError(
            f"{table.policy} has [[{kind}]] rules, which are for the head of a cluster",
            hint="a provider's own policy keeps layers where they belong",
        )
    return ProviderRules(
        minimum=max(Level.from_text(table.min_level), policy.minimum),
        policy=policy,
        operators=operators | _keys(table.operators, file, "operators"),
        revoked=_keys(table.revoked, file, "revoked"),
        every_member=table.every_member,
    )


def _keys(texts: list[str], file: Path | None, key: str) -> frozenset[bytes]:
    return frozenset(decode_public_key(text, f"{file}: [evidence] {key}") for text in texts)
