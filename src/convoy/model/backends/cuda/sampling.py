"""Drawing where the logits are: of a greedy row the device sends a number, of any other its logits.

A step of 64 rows of a vocabulary of 128,256 has 33 MB of logits, which would take the host longer to copy and
to look through than the device takes for all of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl

from convoy.errors import StepError
from convoy.model.backends.cuda.kernels.language import kernel, next_power
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.memory.staging import Staging
from convoy.model.sampling.output_rows import SampleJob, SampleResult, draw
from convoy.model.sampling.sample import Sampled

_BLOCK = 8192  # logits that a program looks at together


@dataclass(frozen=True)
class PendingDraws:
    """Outcomes that the device still works on."""

    draws: Sequence[SampleJob]
    vocab_size: int
    greedy: tuple[int, ...]  # indices into ``draws``
    found: PendingResult  # int32 [2, len(greedy)]: tokens, and how many logits are not finite
    others: tuple[int, ...]
    logits: PendingResult  # float32 [len(others), vocab_size]

    def outcomes(self) -> tuple[SampleResult, ...]:
        """One for each draw, in their order."""
        done: dict[int, SampleResult] = {}
        tokens, num_bad = self.found.wait().tolist()
        for index, token, bad in zip(self.greedy, tokens, num_bad, strict=True):
            error = None
            if bad:
                error = StepError(f"{bad} of {self.vocab_size} logits are not finite, expected none")
            done[index] = SampleResult(Sampled(0 if bad else token), error=error)
        rows = self.logits.wait().numpy()
        for index, row in zip(self.others, rows, strict=True):
            done[index] = draw(row, self.draws[index])
        return tuple(done[index] for index in range(len(self.draws)))


def start_draws(
    logits: torch.Tensor, draws: Sequence[SampleJob], copies: torch.cuda.Stream, staging: Staging
) -> PendingDraws:
    """Begin ``draws`` of ``logits`` [len(draws), vocab_size] on a device. Raises StepError for others."""
    if len(logits) != len(draws):
        raise StepError(f"a step has {len(logits)} outputs and {len(draws)} draws")
    greedy = tuple(index for index, one in enumerate(draws) if _is_greedy(one))
    others = tuple(index for index in range(len(draws)) if index not in set(greedy))
    found = best_tokens(_rows(logits, greedy, staging))
    return PendingDraws(
        *(draws, logits.shape[1]),
        *(greedy, PendingResult.copied(found, copies)),
        *(others, PendingResult.copied(_rows(logits, others, staging).float(), copies)),
    )


def best_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Of each row the token with the greatest logit, of equal ones the lowest, as NumPy's argmax has it.

    And how many logits are not finite; where any is not, the token means nothing. int32 [2, rows], by one
    kernel: what torch makes of it is ten, each of which the thread that submits steps would start.
    """
    num_rows, width = logits.shape
    out = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        best_kernel[num_rows,](
            out,
            logits,
            num_rows,
            logits.stride(0),
            WIDTH=width,
            BLOCK=min(_BLOCK, next_power(width)),
            num_warps=8,
        )
    return out


def _is_greedy(one: SampleJob) -> bool:
    params = one.params
    plain = params.greedy and not params.reshapes and params.logprobs is None
    return plain and one.score is None and not (one.wants_logits or one.allowed or one.banned)


def _rows(logits: torch.Tensor, chosen: tuple[int, ...], staging: Staging) -> torch.Tensor:
    if len(chosen) == logits.shape[0]:
        return logits
    return logits.index_select(0, staging.on_card(torch.tensor(chosen, dtype=torch.int64)))


# fmt: off


@kernel
def best_kernel(out: tl.tensor, logits: tl.tensor, rows: tl.tensor, stride: tl.tensor, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr) -> None:
    """Grid (rows,)"""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    lowest = float("-inf")
    best = tl.full([BLOCK], lowest, dtype=tl.float32)
    where = tl.full([BLOCK], WIDTH - 1, dtype=tl.int32)
    bad = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, WIDTH, BLOCK):
        token = start + lane
        known = token < WIDTH
        found = tl.load(logits + row * stride + token, mask=known, other=lowest).to(tl.float32)
        # of a number that is not finite the difference from itself is none
        bad += (known & (found - found != 0)).to(tl.int32)
        where = tl.where(found > best, token, where)
        best = tl.maximum(best, found)
    greatest = tl.max(best, 0)
    tl.store(out + row, tl.min(tl.where(best == greatest, where, WIDTH - 1), 0))
    tl.store(out + rows + row, tl.sum(bad, 0))
