"""How much a scheduler may run at once."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.engine.speculation import MAX_DRAFT
from convoy.plan.cost import TokenCost


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """The blocks of one cache group. A table has at most ``ring`` of them; None: as many as it takes.

    A block has one place for every ``stride`` tokens.
    """

    num_blocks: int
    ring: int | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the plan granted: blocks of each group, rows and tokens per step, waiting places, steps in flight.

    ``prefill_window`` bounds the chunks of one prompt that are in flight; 0: as many as micro-batches. With
    ``cost``, a chunk costs no more than one of ``prefill_chunk`` tokens does at the start of a prompt.
    A prompt that runs alone is cut into a chunk for each micro-batch, so that every stage has one at once,
    but into none of fewer than ``least_chunk`` tokens: with those a row costs more. (`llama-250m` in exact
    float32 on one 2.5 GHz core, eight layers: 2.14 ms a row for 256 rows, 2.16 for 128, 2.48 for 64, 2.82
    for 32, 3.51 for 16. So 128 tokens over two stages take 0.86 of what one chunk takes, 256 take 0.76.)
    Without ``prefix_cache`` no sequence shares a block, nor over several groups or a ring, where no block is
    all there is of a prefix.

    ``max_drafts`` bounds the guesses in one step: its decodes share them. It is `MAX_DRAFT`, so that a
    sequence alone may guess whatever ``speculate`` allows; and no more than that, because behind 64 rows
    another row is nearly as dear as a step's share of the weights (above), so that what a wrong guess costs
    is paid by every stream in the step.
    """

    groups: tuple[GroupLimits, ...]
    block_size: int
    max_batch: int = 32
    max_step_tokens: int = 512
    prefill_chunk: int = 256
    prefill_window: int = 0
    max_waiting: int = 256
    micro_batches: int = 1
    prefix_cache: bool = True
    max_drafts: int = MAX_DRAFT
    least_chunk: int = 64
    cost: TokenCost | None = None

    @property
    def shares_prefixes(self) -> bool:
        """Whether sequences may share blocks."""
        first = self.groups[0]
        return self.prefix_cache and len(self.groups) == 1 and first.ring is None and first.stride == 1

    @property
    def max_chunks(self) -> int:
        """How many chunks of one prompt may be in flight."""
        return self.prefill_window or self.micro_batches
