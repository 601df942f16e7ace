"""The way of a token through the stages: its hops, the readers of prompts, and the missing parts."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from convoy.plan.span import Span, format_span, layers_text
from convoy.plan.spec.model import ModelSpec
from convoy.wire.messages.control import StageAssignment

READS_TOKENS, READS_ACTIVATIONS, READS_NOTHING = "tokens", "activations", "no"


@dataclass(frozen=True)
class Hop:
    """Describe one transfer of hidden state to the next stage, or back to the owner of the output."""

    sender: str
    receiver: str
    # The layer that comes next; num_layers before the output.
    boundary: int
    # If False, only the rows that the output needs.
    all_rows: bool


@dataclass(frozen=True)
class Route:
    """Hold stages in the order of their layers. A route may lack some: then `missing` names them."""

    spec: ModelSpec
    stages: tuple[StageAssignment, ...]
    head: str

    @property
    def hops(self) -> tuple[Hop, ...]:
        """Return the transfers of hidden state for one step, in order; none if one member owns everything."""
        hops = [
            Hop(before.member, after.member, before.end, all_rows=True)
            for before, after in itertools.pairwise(self.stages)
        ]
        owner = next((stage.member for stage in self.stages if stage.output), None)
        if self.stages and owner is not None and owner != self.stages[-1].member:
            hops.append(Hop(self.stages[-1].member, owner, self.stages[-1].end, all_rows=False))
        return tuple(hops)

    @property
    def token_id_members(self) -> tuple[str, ...]:
        """Return the members that see token ids: the head, and holders of stages that embed, sample or need
        ids.

        All ranks of such a stage see them: each has a part of the vocabulary, and looks ids up in it.
        """
        readers = [
            name
            for stage in self.stages
            if stage.embed or stage.output or self.spec.needs_token_ids(stage.start, stage.end)
            for name in stage.holders
        ]
        return tuple(dict.fromkeys([self.head, *readers]))

    def reads_prompts(self, member: str) -> str:
        """Return the source of prompts for ``member``: ``tokens``, ``activations``, or ``no`` without a
        layer.

        The activations of any layer are enough to recover every token (`convoy verify --leak`).
        """
        if member in self.token_id_members:
            return READS_TOKENS
        has_layers = any(member in stage.holders for stage in self.stages)
        return READS_ACTIVATIONS if has_layers else READS_NOTHING

    @property
    def missing(self) -> str:
        """Return the parts without an owner, in words (``layers 4-7 and the output``); empty if complete."""
        runs = missing_layers(self.spec.num_layers, [(stage.start, stage.end) for stage in self.stages])
        parts = [layers_text(start, end) for start, end in runs]
        if not any(stage.embed for stage in self.stages) and not any(start == 0 for start, _ in runs):
            parts.insert(0, "the embedding")
        if not any(stage.output for stage in self.stages):
            parts.append("the output")
        return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))

    @property
    def complete(self) -> bool:
        """Return whether a token can pass every layer."""
        return not self.missing

    def without(self, gone: Collection[str]) -> Route:
        """Return the route without these members; a stage that lacks a rank is gone with it."""
        left = (stage for stage in self.stages if not set(stage.holders) & set(gone))
        return Route(self.spec, tuple(left), self.head)

    def describe(self) -> str:
        """Return one line:

        ``complete: alpha 0:3,output -> beta 4:11 -> alpha``, or ``missing layers 4-11``.
        """
        return f"missing {self.missing}" if self.missing else f"complete: {self.text}"

    @property
    def text(self) -> str:
        """Return the members and spans in order: ``alpha 0:3,output -> beta+gamma 4:11 -> alpha``."""
        names = [f"{'+'.join(stage.holders)} {self._span_text(stage)}" for stage in self.stages]
        if self.hops and not self.hops[-1].all_rows:
            names.append(self.hops[-1].receiver)
        return " -> ".join(names)

    def _span_text(self, stage: StageAssignment) -> str:
        return format_span(Span(stage.start, stage.end, stage.output), self.spec.num_layers)


def missing_layers(num_layers: int, owned: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return runs [start, end) of layers that are in none of the ``owned`` runs, ascending."""
    runs = []
    reached = 0
    for start, end in sorted(owned):
        if start > reached:
            runs.append((reached, start))
        reached = max(reached, end)
    if reached < num_layers:
        runs.append((reached, num_layers))
    return runs
