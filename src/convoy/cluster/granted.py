"""A plan once every member has loaded: what runs, until the next one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from convoy.plan.placement import Placement
from convoy.wire.codec import encode_message
from convoy.wire.messages import Plan


@dataclass(frozen=True, slots=True)
class Granted:
    """What the plan came to."""

    plan: Plan
    placement: Placement
    weight_bytes: dict[str, int]
    num_blocks: tuple[int, ...]  # by cache group
    max_context: int
    num_places: int = 1  # stages, of which the head's own counts once for each of its devices

    @property
    def members(self) -> set[str]:
        return {stage.member for stage in self.plan.stages}


def plan_digest(plan: Plan) -> bytes:
    """SHA-256 of the plan's encoding: what `Activate` names."""
    return hashlib.sha256(encode_message(plan)).digest()
