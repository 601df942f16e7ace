"""Sample on the device: of most rows, only token ids and log-probabilities reach the host.

A step of 64 rows with a vocabulary of 128,256 has 33 MB of logits. The host would take longer to copy and
scan them than the device takes for all of its layers. The host takes the rows that the device does not: see
`_is_for_host`, and the status of `kernels.draws`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton.language as tl

from convoy.errors import StepError
from convoy.model.backends.cuda.kernels import draws
from convoy.model.backends.cuda.kernels.language import kernel, kernel_of_any, next_power
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.memory.staging import Staging
from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob, SampleResult, sample_row, with_states
from convoy.model.sampling.params import MAX_LOGPROBS, SamplingParams
from convoy.model.sampling.rows import Edits, RowParams, fits, params_of
from convoy.model.sampling.sample import Sampled

# Logits that one program reads at once.
_BLOCK = 8192
_EDITS = 256
# Numbers of best tokens that kernels are compiled for.
_TOPS = (0, 5, MAX_LOGPROBS)


@dataclass(frozen=True)
class DeviceSamples:
    """Hold samples that the device still computes."""

    jobs: Sequence[SampleJob]
    # Of the rows in ``here``, [len(here), vocab_size] on the device, for rows that the host must take.
    kept: torch.Tensor
    here: tuple[int, ...]  # indices into ``jobs``
    # int32 [2, len(here)]: token ids, and a status that is 0 for a good one; on the device too.
    found: PendingResult
    drawn: torch.Tensor
    # The rows of ``here`` with log-probabilities, and float64 [rows, 1 + 2 * top]: see `kernels.draws`.
    scored: tuple[int, ...]
    scores: PendingResult
    others: tuple[int, ...]
    logits: PendingResult  # float32 [len(others), vocab_size]
    # float32 [rows, hidden_size], of the jobs that want one; None where none does.
    states: PendingResult | None = None

    def outcomes(self) -> tuple[SampleResult, ...]:
        """Return one result for each job, in their order. Waits for the device."""
        done: dict[int, SampleResult] = {}
        tokens, statuses = self.found.wait().tolist()
        scores = dict(zip(self.scored, self.scores.wait().tolist(), strict=True))
        for place, (index, token, status) in enumerate(zip(self.here, tokens, statuses, strict=True)):
            if status:
                # The host finds the error, or draws a token that lies too near to a limit.
                drawn = sample_row(self.kept[place].float().cpu().numpy(), self.jobs[index])
                done[index] = replace(drawn, feeds=False)
            elif place in scores:
                done[index] = SampleResult(_scored(token, scores[place], self.jobs[index]))
            else:
                done[index] = SampleResult(Sampled(token))
        rows = self.logits.wait().numpy()
        for index, row in zip(self.others, rows, strict=True):
            done[index] = replace(sample_row(row, self.jobs[index]), feeds=False)
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
    others = tuple(index for index, one in enumerate(jobs) if _is_for_host(one, width))
    here = tuple(index for index in range(len(jobs)) if index not in set(others))
    own = _rows(logits, here, staging)
    chosen = [jobs[index] for index in here]
    if all(_is_plain(one) for one in chosen):
        masks = _masks([one.mask for one in chosen], width)
        found = best_tokens(own, None if masks is None else staging.on_card(masks))
    else:
        found = draw_tokens(own, params_of(chosen, width), staging)
    scored = tuple(place for place, one in enumerate(chosen) if one.params.logprobs is not None)
    most = max((chosen[place].params.logprobs or 0 for place in scored), default=0)
    scores = score_tokens(own, found[0], scored, most, staging)
    return DeviceSamples(
        *(jobs, own),
        here,
        PendingResult.copied(found, copies),
        found,
        *(scored, PendingResult.copied(scores, copies)),
        *(others, PendingResult.copied(_rows(logits, others, staging).float(), copies)),
        None if states is None else PendingResult.copied(states, copies),
    )


def draw_tokens(logits: torch.Tensor, params: RowParams, staging: Staging) -> torch.Tensor:
    """Return each row's token, and its status (`kernels.draws`): int32 [2, rows].

    The logits [rows, vocab_size] stay as they are. Where the status is not 0, the token has no meaning.
    """
    num_rows, width = logits.shape
    card = logits.device
    parts = -(-width // draws.PART)
    grid = (num_rows, parts)
    words = mask_bytes(width) // 4 if len(params.masks) else 0
    table = staging.on_card(torch.from_numpy(params.table))
    masks = staging.on_card(torch.from_numpy(params.masks).view(torch.int32)) if words else table
    cuts = params.cuts_count or params.cuts_mass
    scratch = _Scratch.made(num_rows, parts, card, cuts=cuts)
    work = logits if params.edits is None else _edited(logits, params.edits, scratch.flags, staging)
    flags, keys, places = scratch.flags, scratch.keys, scratch.places
    ends = (scratch.peaks, scratch.lows)
    draws.peak_kernel[grid](
        *(*ends, places, flags, keys, work, logits, table, masks, work.stride(0), logits.stride(0)),
        WORDS=words,
        WIDTH=width,
        EDITED=work is not logits,
        num_warps=8,
    )
    data = (work, table, masks, *ends, work.stride(0))
    plain = {"WIDTH": width, "PARTS": next_power(parts), "num_warps": 8}
    shape = {"SCALE": mass_scale(width), **plain}
    if cuts:
        tokens = torch.empty(num_rows, width, dtype=torch.int32, device=card)
        sums = (scratch.totals, scratch.counts, scratch.sums)
        draws.bin_kernel[grid](
            scratch.counts, scratch.sums, *data, COUNTED=params.cuts_count, WORDS=words, **shape
        )
        for by_mass in [False] * params.cuts_count + [True] * params.cuts_mass:
            numbers = scratch.numbers[int(by_mass)]
            draws.collect_kernel[grid](
                *(tokens, numbers, keys, *sums, *data), BY_MASS=by_mass, WORDS=words, **plain
            )
            draws.limit_kernel[(num_rows,)](
                *(keys, scratch.totals, flags, tokens, numbers, *sums[1:], work, table, *ends),
                *(work.stride(0), parts),
                BY_MASS=by_mass,
                **shape,
            )
    out = torch.empty(2, num_rows, dtype=torch.int32, device=card)
    draws.mass_kernel[grid](scratch.held, flags, keys, *data, WORDS=words, **shape)
    draws.pick_kernel[(num_rows,)](out, scratch.held, flags, keys, places, *data, parts, WORDS=words, **shape)
    return out


@dataclass(frozen=True)
class _Scratch:
    """Hold what the kernels leave for each other: of each row, and of each of its parts."""

    flags: torch.Tensor  # int32 [rows]
    numbers: torch.Tensor  # int32 [2, rows]
    counts: torch.Tensor  # int32 [rows, BINS]
    totals: torch.Tensor  # int64 [rows]
    sums: torch.Tensor  # int64 [rows, BINS]
    keys: torch.Tensor  # int64 [rows]
    held: torch.Tensor  # int64 [rows, parts]
    peaks: torch.Tensor  # float32 [rows, parts]
    lows: torch.Tensor  # float32 [rows, parts]
    places: torch.Tensor  # int32 [rows, parts]

    @classmethod
    def made(cls, num_rows: int, parts: int, card: torch.device, *, cuts: bool) -> _Scratch:
        """Return memory of two allocations. The histograms are there only if a row ``cuts``."""
        # Triton compiles anew for an address that is no multiple of 16 bytes, so rows are rounded up.
        rows = -(-num_rows // 16) * 16
        bins = rows * draws.BINS * cuts
        zeros = torch.zeros(2 * rows + bins + bins // 2 + rows // 2, dtype=torch.int64, device=card)
        wide, narrow = zeros[: rows + bins], zeros[rows + bins :].view(torch.int32)
        numbers = narrow[: 2 * rows].view(2, rows)
        free = torch.empty(rows * (1 + parts), dtype=torch.int64, device=card)
        ends = torch.empty(3, rows, parts, dtype=torch.float32, device=card)
        return cls(
            *(narrow[2 * rows : 3 * rows], numbers, narrow[3 * rows :]),
            *(wide[:rows], wide[rows:]),
            *(free[:rows], free[rows:]),
            *(ends[0], ends[1], ends[2].view(torch.int32)),
        )


def mass_scale(width: int) -> float:
    """Return the mass of the weight 1: so many masses of ``width`` tokens stay below 2^62."""
    return float(2 ** (62 - (width - 1).bit_length()))


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, scored: Sequence[int], top: int, staging: Staging
) -> torch.Tensor:
    """Return log-probabilities of the rows ``scored``, float64 [rows, 1 + 2 * some], of at least ``top``.

    The columns are that of the row's token, the ids of some best tokens, and theirs.
    """
    width, card = logits.shape[1], logits.device
    # Each other number would be compiled anew.
    top = min(next(size for size in _TOPS if size >= top), width)
    out = torch.empty(len(scored), 1 + 2 * top, dtype=torch.float64, device=card)
    if scored:
        parts = -(-width // draws.PART)
        rows = staging.on_card(torch.tensor(scored, dtype=torch.int32))
        best = torch.empty(len(scored), parts, max(top, 1), dtype=torch.int64, device=card)
        totals = torch.empty(len(scored), parts, 2, dtype=torch.float64, device=card)
        draws.top_kernel[len(scored), parts](
            best, totals, logits, rows, logits.stride(0), TOP=top, WIDTH=width, num_warps=8
        )
        draws.merge_kernel[(len(scored),)](
            *(out, best, totals, tokens, logits, rows, logits.stride(0), parts),
            TOP=top,
            PARTS=next_power(parts),
            SIZE=next_power(parts * max(top, 1)),
        )
    return out


def feed(tokens: torch.Tensor, samples: torch.Tensor, width: int) -> None:
    """Replace negative ``tokens``, int32 on a device: -1 - i by the token i of ``samples``, int32 [2, rows].

    A token without a meaning becomes 0, so that none is outside the vocabulary of ``width`` tokens.
    """
    count = tokens.shape[0]
    feed_kernel[(-(-count // _EDITS),)](tokens, samples, count, samples.shape[1], width, BLOCK=_EDITS)


def rehearse_sampling(logits: torch.Tensor, staging: Staging) -> None:
    """Run every kernel once over ``logits``, with all the memory that a step of as many rows may take."""
    width = logits.shape[1]
    params = SamplingParams(top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logprobs=MAX_LOGPROBS)
    plain = SampleJob(SamplingParams(), 0, 0)
    for edited in (plain, SampleJob(params, 0, 0, generated_ids=(0,))):
        masked = replace(edited, mask=b"\xff" * mask_bytes(width))
        for job in (edited, masked):
            draw_tokens(logits, params_of([job] * len(logits), width), staging)
    found = best_tokens(logits)
    feed(found[0].clone(), found, width)
    for top in _TOPS:
        score_tokens(logits, found[0], range(len(logits)), top, staging)


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


def _is_for_host(one: SampleJob, width: int) -> bool:
    """Tell whether the host processes a row: its result is no sample, or its fields are wrong."""
    return one.score is not None or one.wants_logits or one.wants_state or not fits(one, width)


def _is_plain(one: SampleJob) -> bool:
    return one.params.greedy and not (one.params.reshapes or one.allowed or one.banned)


def _scored(token: int, line: list[float], one: SampleJob) -> Sampled:
    top = (len(line) - 1) // 2
    best = zip(line[1 : 1 + top], line[1 + top :], strict=True)
    return Sampled(token, line[0], tuple((int(name), value) for name, value in best)[: one.params.logprobs])


def _edited(logits: torch.Tensor, edits: Edits, flags: torch.Tensor, staging: Staging) -> torch.Tensor:
    """Return a float32 copy of the logits with the edits of all rows."""
    work = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
    count = edits.places.shape[1]
    both = np.concatenate([edits.places, edits.values.view(np.int32)])
    there = staging.on_card(torch.from_numpy(both))
    draws.edit_kernel[(-(-count // _EDITS),)](
        *(work, flags, there, count, work.stride(0)),
        BLOCK=_EDITS,
        # The host rounds each product and each sum by itself.
        enable_fp_fusion=False,
    )
    return work


def _rows(logits: torch.Tensor, chosen: tuple[int, ...], staging: Staging) -> torch.Tensor:
    if len(chosen) == logits.shape[0]:
        return logits
    return logits.index_select(0, staging.on_card(torch.tensor(chosen, dtype=torch.int64)))


# fmt: off


@kernel_of_any("count", "rows", "width")
def feed_kernel(tokens: tl.tensor, samples: tl.tensor, count: tl.tensor, rows: tl.tensor, width: tl.tensor,
                BLOCK: tl.constexpr) -> None:
    """Put samples in the places of the tokens that name them. Grid (parts of the tokens,)."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    asked = tl.load(tokens + at, mask=at < count, other=0)
    place = -1 - asked
    known = (asked < 0) & (place < rows)
    token = tl.load(samples + place, mask=known, other=0)
    token = tl.where((token >= 0) & (token < width), token, 0)
    tl.store(tokens + at, token, mask=(at < count) & (asked < 0))


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
