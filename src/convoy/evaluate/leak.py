"""Measure how much of a prompt a peer recovers from its activations by trying every token.

The model is causal and deterministic, and a peer has its weights. For each position the search runs every
token of the vocabulary after the tokens recovered so far, through the layers before the cut. It takes the
token with the activation nearest to the one that was sent. A better attacker is faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from convoy.engine.ranks.load import load_member_stage
from convoy.errors import InputError
from convoy.evaluate.candidates import Candidates, candidates_of
from convoy.evaluate.chain import StageLoader
from convoy.evaluate.cuts import allowed_cuts, spread
from convoy.model.checkpoints.source import ModelSource
from convoy.model.stage import LoadedStage, StageOptions
from convoy.plan.placement.route import READS_ACTIVATIONS, READS_TOKENS
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import StageAssignment

AT_MOST = "at most: a better attacker is faster"
# The number of depths by default: the first, the middle and the last cut.
DEPTHS = 3

# Called with (number done, number in all, next piece of work).
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class LeakOptions:
    """Hold the search's options: ``depths`` are numbers of layers before the cut."""

    kernel: str
    depths: tuple[int, ...]
    num_threads: int | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class DepthLeak:
    """Hold the tokens that a peer recovers from the activations after ``depth`` layers.

    ``reads`` is "tokens" if the peer receives the token ids themselves; then nothing is searched. ``ties``
    counts positions at which another token's activation is as near.
    """

    depth: int
    reads: str
    recovered: int
    num_tokens: int
    ties: int = 0
    seconds_per_token: float | None = None


@dataclass(frozen=True)
class LeakReport:
    """Hold the results at all depths of one model, with one prompt."""

    model: str
    digest: str
    kernel: str
    num_layers: int
    vocab_size: int
    num_tokens: int
    depths: tuple[DepthLeak, ...]
    bound: str = AT_MOST


@dataclass(frozen=True)
class RecoveredPrompt:
    """Hold the tokens of a search, in order, and the number of positions with more than one nearest token."""

    tokens: tuple[int, ...]
    ties: int


def default_depths(spec: ModelSpec) -> tuple[int, ...]:
    """Return the first, the middle and the last cut that the model allows."""
    return tuple(spread(allowed_cuts(spec), DEPTHS))


def check_depths(spec: ModelSpec, depths: Sequence[int]) -> None:
    """Raise InputError for a model without a cut, and for a depth at which it is not cut."""
    allowed = allowed_cuts(spec)
    if not allowed:
        raise InputError(f"{spec.name} has no cut between layers, so no peer is sent activations")
    for depth in depths:
        if depth not in allowed:
            last = spec.num_layers - 1
            why = spec.forbidden_cuts.get(depth, f"expected a cut behind 1 to {last} layers")
            raise InputError(f"--leak-depths has {depth}: {why}")


def leak(
    source: ModelSource,
    prompt: Sequence[int],
    options: LeakOptions,
    progress: Progress = lambda *_: None,
    *,
    load: StageLoader = load_member_stage,
    now: Callable[[], float] = time.monotonic,
) -> LeakReport:
    """Search for ``prompt`` at every depth of ``options``. Raises InputError, ModelError, SelfCheckError."""
    spec = source.spec
    check_depths(spec, options.depths)
    depths = sorted(set(options.depths))
    total = len(depths) * len(prompt)
    found: list[DepthLeak] = []
    stage: LoadedStage | None = None
    for depth in depths:
        done = len(found) * len(prompt)
        if spec.needs_token_ids(depth, spec.num_layers):
            found.append(DepthLeak(depth, READS_TOKENS, len(prompt), len(prompt)))
            continue
        progress(done, total, f"loading layers 0-{depth - 1}")
        stage = _load(source, depth, options, load, stage)
        candidates = candidates_of(spec, stage, len(prompt))
        sent = candidates.sent(prompt)
        report = partial(_report, progress, done, total, depth)
        started = now()
        result = search(candidates, sent, report)
        seconds = (now() - started) / len(prompt)
        recovered = sum(mine == theirs for mine, theirs in zip(result.tokens, prompt, strict=True))
        found.append(DepthLeak(depth, READS_ACTIVATIONS, recovered, len(prompt), result.ties, seconds))
    progress(total, total, "")
    return LeakReport(
        model=source.name,
        digest=source.digest,
        kernel=options.kernel,
        num_layers=spec.num_layers,
        vocab_size=spec.vocab_size,
        num_tokens=len(prompt),
        depths=tuple(found),
    )


def search(
    candidates: Candidates, sent: torch.Tensor, progress: Callable[[int], None] = lambda _: None
) -> RecoveredPrompt:
    """Return the tokens for ``sent`` [T, hidden_size], each the nearest one after the tokens before it.

    The search has the activations and the layers, not the prompt. Of several nearest tokens it takes the
    lowest.
    """
    tokens: list[int] = []
    ties = 0
    for index, target in enumerate(sent):
        progress(index)
        distances = torch.cat([_distances(rows, target) for rows in candidates.rows(tokens)])
        nearest = int(distances.argmin())
        ties += int((distances == distances[nearest]).sum()) > 1
        tokens.append(nearest)
    return RecoveredPrompt(tuple(tokens), ties)


def _distances(rows: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return [n]: squared distances of ``rows`` from ``target``; infinite if they are not finite."""
    distances = (rows.double() - target.double()).square().sum(dim=1)
    return torch.where(distances.isfinite(), distances, torch.inf)


def _load(
    source: ModelSource, depth: int, options: LeakOptions, load: StageLoader, before: LoadedStage | None
) -> LoadedStage:
    assignment = StageAssignment("attacker", 0, depth, embed=True, output=False)
    stage_options = StageOptions(
        kernel=options.kernel,
        # One token a block, so that candidates share every token before theirs.
        block_size=1,
        device=options.device,
        captured=False,
        num_threads=options.num_threads,
        require_tags=False,
    )
    return load(source, assignment, stage_options, before=before)


def _report(progress: Progress, done: int, total: int, depth: int, index: int) -> None:
    progress(done + index, total, f"behind layers 0-{depth - 1}")
