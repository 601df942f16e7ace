"""What an engine asks for when a stage is lost, and gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from convoy.engine.executor import Executor
from convoy.engine.scheduler import SchedulerLimits
from convoy.errors import StageLost


@dataclass(frozen=True, slots=True)
class Recovered:
    """Other stages, which know no sequence yet.

    ``relapse``: no member was lost, and yet the stages failed; so what was in flight may be why. Where it is
    known, ``failed_at`` is the member whose stage did; None also where it may have been one of two.
    ``same_bits``: they compute to the bit what those before them did.
    """

    executor: Executor
    limits: SchedulerLimits
    max_context: int
    relapse: bool = False
    failed_at: str | None = None
    same_bits: bool = True


class Renewal(StageLost):
    """Nothing is lost, but nothing runs either, and there may be better stages now."""

    def __init__(self, why: str) -> None:
        super().__init__(why, public=why)


class Recovery(Protocol):
    """Finds other stages. Called on the engine's thread, without its lock."""

    def recover(self, error: StageLost) -> Recovered | None:
        """Other stages, or None where nothing was lost and the steps in flight may still come back.

        May take as long as members may be waited for. Raises `StageLost` where no stages were to be had in
        that time, and is asked again at once with it: then it does not answer without a pause. Any other
        `ConvoyError` is for good.
        """

    def state(self) -> str:
        """How far it is, in a few words, from any thread. Clients read them, so no peer has written any."""

    def cancel(self) -> None:
        """`recover` raises soon, now and from now on; from any thread."""
