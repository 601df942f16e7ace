"""Start a step with fed tokens: each is a sample of a step ahead, which the host may not have yet.

A stage that takes its own samples gets the place of each one, and waits for it on its device. Every other
stage gets the tokens themselves, once the samples are complete. The executors of one stage and of several
share this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from convoy.errors import StepError
from convoy.model.stage import FeedingStage, PendingHidden, PendingSamples, Stage
from convoy.model.tensors import tokens_from_bytes
from convoy.wire.messages.control import FED, Step


@dataclass(slots=True, eq=False)
class StepSamples:
    """Hold the samples of a step; ``pending`` is None until its sampling starts."""

    count: int
    # By sequence, the place of its last sample.
    places: dict[int, int]
    pending: PendingSamples | None = None

    @classmethod
    def of(cls, step: Step) -> StepSamples:
        """Return the place for the samples of ``step``."""
        ends = list(accumulate(row.num_outputs for row in step.rows))
        ended = zip(step.rows, ends, strict=True)
        places = {row.sequence: end - 1 for row, end in ended if row.num_outputs}
        return cls(ends[-1] if ends else 0, places)


@dataclass(slots=True)
class FedTokens:
    """Name the sample for each fed token of a step: the token's index, its source, and the place there."""

    named: list[tuple[int, StepSamples, int]] = field(default_factory=list)
    # Each source once, in the order of first use.
    sources: list[StepSamples] = field(default_factory=list)

    @classmethod
    def of(cls, step: Step, ahead: Iterable[StepSamples]) -> FedTokens:
        """Find the samples among those of the steps ``ahead``, the newest first. Raises `StepError`."""
        indices = (np.frombuffer(step.tokens, dtype="<u4") == FED).nonzero()[0].tolist()
        if not indices:
            return cls()
        ends = accumulate(row.num_tokens for row in step.rows)
        last = {end - 1: row.sequence for row, end in zip(step.rows, ends, strict=True)}
        newest: dict[int, StepSamples] = {}
        for samples in reversed(list(ahead)):
            newest.update(dict.fromkeys(samples.places, samples))
        found = [(index, last.get(index, -1)) for index in indices]
        if missing := [index for index, sequence in found if sequence not in newest]:
            raise StepError(
                f"step {step.number} has {len(missing)} fed tokens, which no step ahead of it samples"
            )
        named = [(index, newest[one], newest[one].places[one]) for index, one in found]
        return cls(named, list(dict.fromkeys(source for _, source, _ in named)))

    @property
    def may_start(self) -> bool:
        """Return whether the sampling of every source has started."""
        return all(source.pending is not None for source in self.sources)


class StepStarter:
    """Start steps on the stage that owns the embedding, with fed tokens or without."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._feeder = stage if isinstance(stage, FeedingStage) and stage.feeds else None

    @property
    def on_device(self) -> bool:
        """Return whether the stage takes its own samples."""
        return self._feeder is not None

    def start(self, step: Step, fed: FedTokens, *, selects: bool = False) -> PendingHidden:
        """Start ``step``, of which all sources may start. Raises `StepError`."""
        tokens = tokens_from_bytes(step.tokens)
        if not fed.named:
            return self._stage.start(step, None, tokens, selects=selects)
        samples = [source.pending for source in fed.sources if source.pending is not None]
        if self._feeder is None:
            # Here the tokens are needed at once.
            known = [one.outcomes() for one in samples]
            results = dict(zip(map(id, fed.sources), known, strict=True))
            for index, source, place in fed.named:
                tokens[index] = results[id(source)][place].sampled.token_id
            return self._stage.start(step, None, tokens, selects=selects)
        begins = accumulate((source.count for source in fed.sources), initial=0)
        first = dict(zip(map(id, fed.sources), begins, strict=False))
        for index, source, place in fed.named:
            tokens[index] = -1 - first[id(source)] - place
        return self._feeder.start_fed(step, tokens, samples, selects=selects)
