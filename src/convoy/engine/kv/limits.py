"""The scheduler's limits: blocks, rows, tokens and steps in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from convoy.config.table import ENGINE, HOST_BATCH, HOST_CHUNK, MAX_DRAFT, SERVE
from convoy.plan.cost import TokenCost

# Seconds that a step may take until times have been measured.
STEP_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Hold the limits of one cache group.

    A table has at most ``ring`` blocks; with None, as many as its tokens need. A block has one place for
    every ``stride`` tokens. In a ring, a row looks back on ``window`` tokens, its first own one included. A
    ring of one block holds a state.
    """

    num_blocks: int
    ring: int | None = None
    stride: int = 1
    window: int | None = None

    @property
    def is_state(self) -> bool:
        """Return whether a block holds the whole state of a sequence."""
        return self.ring == 1


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Hold the plan's limits: blocks of each group, rows and tokens per step, waiting places, steps in
    flight.

    ``prefill_window`` bounds the chunks of one prompt that are in flight; 0 means as many as micro-batches.
    With ``cost``, a chunk costs no more than one of ``prefill_chunk`` tokens costs at the start of a prompt.

    A prompt that runs alone is cut into a chunk for each micro-batch, so that every stage has one at once. No
    chunk is cut below ``least_chunk`` tokens, because a row costs more in small chunks. (`llama-250m` in
    exact float32 on one 2.5 GHz core, eight layers: 2.14 ms a row for 256 rows, 2.16 for 128, 2.48 for 64,
    2.82 for 32, 3.51 for 16. So 128 tokens over two stages take 0.86 of the time of one chunk, 256 take
    0.76.)

    With ``chunk_s``, the chunks in a step beside decodes take about so many seconds at most, as measured.

    Without ``prefix_cache`` no sequence shares a block. Neither does any with a ring of unknown window.

    ``max_drafts`` bounds the guesses in one step; its decodes share them. It is `MAX_DRAFT`, so that a lone
    sequence may guess whatever ``speculate`` allows. It is not more, because behind 64 rows another row costs
    nearly as much as a step's share of the weights (above), so that every stream in the step would pay for a
    wrong guess.
    """

    groups: tuple[GroupLimits, ...]
    block_size: int
    max_batch: int = HOST_BATCH
    max_step_tokens: int = ENGINE.max_step_tokens
    prefill_chunk: int = HOST_CHUNK
    prefill_window: int = ENGINE.prefill_window
    max_waiting: int = SERVE.max_waiting
    micro_batches: int = 1
    prefix_cache: bool = True
    max_drafts: int = MAX_DRAFT
    least_chunk: int = 64
    cost: TokenCost | None = None
    chunk_s: float | None = None

    def decode_rows(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return numbers of rows, one for each of the ascending ``sizes`` that a decode may be padded to."""
        most = min(-(-self.max_batch // self.micro_batches), self.max_waiting, self.max_step_tokens)
        smaller = [size for size in sizes if size < most]
        return tuple(smaller if len(smaller) == len(sizes) else [*smaller, most])

    @property
    def shares_prefixes(self) -> bool:
        """Return whether sequences may share blocks."""
        known = all(group.ring is None or group.is_state or group.window for group in self.groups)
        return self.prefix_cache and known

    @property
    def max_chunks(self) -> int:
        """Return how many chunks of one prompt may be in flight."""
        return self.prefill_window or self.micro_batches
