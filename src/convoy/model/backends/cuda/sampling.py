"""Sample on the device: a greedy row sends one token id to the host, other rows send their logits.

A step of 64 rows with a vocabulary of 128,256 has 33 MB of logits. The host would take longer to copy and
scan them than the device takes for all of its layers.
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
from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob, SampleResult, sample_row, with_states
from convoy.model.sampling.sample import Sampled

# Logits that one program reads at once.
_BLOCK = 8192


@dataclass(frozen=True)
class DeviceSamples:
    """Hold samples that the device still computes."""

    jobs: Sequence[SampleJob]
    vocab_size: int
    greedy: tuple[int, ...]  # indices into ``jobs``
    # int32 [2, len(greedy)]: token ids, and the number of logits that are not finite.
    found: PendingResult
    others: tuple[int, ...]
    logits: PendingResult  # float32 [len(others), vocab_size]
    # float32 [rows, hidden_size], of the jobs that want one; None where none does.
    states: PendingResult | None = None

    def outcomes(self) -> tuple[SampleResult, ...]:
        """Return one result for each job, in their order. Waits for the device."""
        done: dict[int, SampleResult] = {}
        tokens, num_bad = self.found.wait().tolist()
        for index, token, bad in zip(self.greedy, tokens, num_bad, strict=True):
            error = None
            if bad:
                error = StepError(f"{bad} of {self.vocab_size} logits are not finite, expected none")
            done[index] = SampleResult(Sampled(0 if bad else token), error=error)
        rows = self.logits.wait().numpy()
        for index, row in zip(self.others, rows, strict=True):
            done[index] = sample_row(row, self.jobs[index])
        results = tuple(done[index] for index in range(len(self.jobs)))
        states = self.states
        return (
            results
            if states is None
            else with_states(results, self.jobs, lambda _rows: states.wait().numpy())
        )


def start_sampling(
    logits: torch.Tensor,
    jobs: Sequence[SampleJob],
    copies: torch.cuda.Stream,
    staging: Staging,
    states: torch.Tensor | None = None,
) -> DeviceSamples:
    """Start sampling for ``jobs`` from ``logits`` [len(jobs), vocab_size] on a device.

    ``states`` are the final states of the jobs that want one.

    Raises StepError where their numbers differ.
    """
    if len(logits) != len(jobs):
        raise StepError(f"a step has {len(logits)} outputs and {len(jobs)} sample jobs")
    width = logits.shape[1]
    greedy = tuple(index for index, one in enumerate(jobs) if _is_greedy(one, width))
    others = tuple(index for index in range(len(jobs)) if index not in set(greedy))
    masks = _masks([jobs[index].mask for index in greedy], width)
    found = best_tokens(_rows(logits, greedy, staging), None if masks is None else staging.on_card(masks))
    return DeviceSamples(
        *(jobs, width),
        *(greedy, PendingResult.copied(found, copies)),
        *(others, PendingResult.copied(_rows(logits, others, staging).float(), copies)),
        None if states is None else PendingResult.copied(states, copies),
    )


def best_tokens(logits: torch.Tensor, masks: torch.Tensor | None = None) -> torch.Tensor:
    """Return each row's token with the greatest logit, and its number of non-finite logits: int32 [2, rows].

    ``masks``, int32 [rows, words], has a bit for each token, and only tokens with a 1 count; each row has at
    least one. Of equal logits the lowest token wins, as in NumPy's argmax. Where any logit is not finite, the
    token has no meaning. One kernel does all of it. Torch would need ten kernels, each launched by the thread
    that submits steps.
    """
    num_rows, width = logits.shape
    out = torch.empty(2, num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        best_kernel[num_rows,](
            out,
            logits,
            # Without masks the kernel reads nothing there.
            out if masks is None else masks,
            num_rows,
            logits.stride(0),
            0 if masks is None else masks.stride(0),
            MASKED=masks is not None,
            WIDTH=width,
            BLOCK=min(_BLOCK, next_power(width)),
            num_warps=8,
        )
    return out


def _masks(masks: Sequence[bytes], width: int) -> torch.Tensor | None:
    """Return the masks of rows, int32 [rows, words], or None if no row has one."""
    if not any(masks):
        return None
    size = mask_bytes(width)
    free = b"\xff" * size
    data = bytearray().join(mask or free for mask in masks)
    return torch.frombuffer(data, dtype=torch.int32).view(len(masks), size // 4)


def _is_greedy(one: SampleJob, width: int) -> bool:
    params = one.params
    # The host finds the error in a mask of another size, and in one without any token.
    if one.mask and (len(one.mask) != mask_bytes(width) or not any(one.mask)):
        return False
    plain = params.greedy and not params.reshapes and params.logprobs is None
    return (
        plain and one.score is None and not (one.wants_logits or one.wants_state or one.allowed or one.banned)
    )


def _rows(logits: torch.Tensor, chosen: tuple[int, ...], staging: Staging) -> torch.Tensor:
    if len(chosen) == logits.shape[0]:
        return logits
    return logits.index_select(0, staging.on_card(torch.tensor(chosen, dtype=torch.int64)))


# fmt: off


@kernel
def best_kernel(out: tl.tensor, logits: tl.tensor, masks: tl.tensor, rows: tl.tensor, stride: tl.tensor,
                mask_stride: tl.tensor, MASKED: tl.constexpr, WIDTH: tl.constexpr,
                BLOCK: tl.constexpr) -> None:
    """Find the best token of one row, among those of its mask. Grid (rows,)."""
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
        # The difference of a non-finite number from itself is NaN, which is not 0.
        bad += (known & (found - found != 0)).to(tl.int32)
        if MASKED:
            word = tl.load(masks + row * mask_stride + token // 32, mask=known, other=0)
            found = tl.where((word >> (token % 32)) & 1 != 0, found, lowest)
        where = tl.where(found > best, token, where)
        best = tl.maximum(best, found)
    greatest = tl.max(best, 0)
    # The lowest token among lanes with the greatest logit, as argmax of NumPy has it.
    tl.store(out + row, tl.min(tl.where(best == greatest, where, WIDTH - 1), 0))
    tl.store(out + rows + row, tl.sum(bad, 0))
