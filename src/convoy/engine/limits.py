"""How much a scheduler may run at once."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.plan.cost import TokenCost


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the plan granted: pool size, rows and tokens per step, waiting places, steps in flight.

    ``prefill_window`` bounds the chunks of one prompt that are in flight; 0: as many as micro-batches. With
    ``cost``, a chunk costs no more than one of ``prefill_chunk`` tokens does at the start of a prompt.
    Without ``prefix_cache`` no sequence shares a block. ``max_drafts`` bounds the guesses in one step: its
    decodes share them, because a guess costs as much to run as a token.
    """

    num_blocks: int
    block_size: int
    max_batch: int = 32
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    prefill_window: int = 0
    max_waiting: int = 256
    micro_batches: int = 1
    prefix_cache: bool = True
    max_drafts: int = 64
    cost: TokenCost | None = None

    @property
    def max_chunks(self) -> int:
        """How many chunks of one prompt may be in flight."""
        return self.prefill_window or self.micro_batches
