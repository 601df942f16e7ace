"""Hold a verdict: the level that a verifier gives to a member, and why it is not a higher one."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.trust.evidence.level import Level


@dataclass(frozen=True, slots=True)
class Verdict:
    """Hold a member's level.

    ``reasons`` kept the member from the next level; ``facts`` are its hardware's report.
    """

    member: str
    level: Level
    reasons: tuple[str, ...] = ()
    facts: dict[str, str] = field(default_factory=dict)

    @property
    def why(self) -> str:
        """Return the reasons in one line."""
        return "; ".join(self.reasons) or "everything that was asked for was proved"


def no_evidence(member: str, reason: str) -> Verdict:
    """Return the verdict on a member that did not answer, or not in time."""
    return Verdict(member, Level.NONE, (reason,))
