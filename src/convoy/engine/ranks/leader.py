"""Rank 0 of a stage that several members hold: whoever runs it sees a stage like any other.

Each order goes to the other ranks first, in their links' order, and then is run here too. So no rank runs
what another does not: an order is sent only where nothing is left but to run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import msgspec
import torch

from convoy.engine.ranks.blocks import RankBlocks
from convoy.engine.ranks.protocol import RankCollective, named, prove
from convoy.engine.ranks.watch import RankWatch
from convoy.errors import CollectiveError, ConvoyError, LinkBroken, LinkClosed, StageLost
from convoy.model.backends.host.stage import Computed, Stage
from convoy.model.sampling.output_rows import SampleJob, SampleTask
from convoy.model.tensors import to_wire
from convoy.transport.link.link import Link, Received
from convoy.wire.messages.control import Message, StageAssignment, Step
from convoy.wire.messages.ranks import RankOutput, RankStep


class LeaderStage:
    """The face of `Stage` over this rank's own slice and the ranks that ``links`` lead to, by rank.

    One thread runs it; any may call `takes`, `ended` and `abort`. ``own`` has joined ``collective``.
    ``num_kv_heads``: of the whole model. ``timeout_s``: how long K/V of another rank may take beside what its
    bytes take. ``culprit``: the rank's member because of which a step failed here.
    """

    overlaps = False
    num_devices = 1

    def __init__(
        self,
        own: Stage,
        collective: RankCollective,
        links: Mapping[int, Link],
        *,
        generation: int,
        num_kv_heads: int,
        timeout_s: float,
    ) -> None:
        self.culprit: str | None = None
        self.assignment: StageAssignment = own.assignment
        self.options = own.options
        self.hidden_size = own.hidden_size
        self.vocab_size = own.vocab_size
        self.token_id_layers = own.token_id_layers
        self.weight_bytes = own.weight_bytes
        self.bytes_read = own.bytes_read
        self._own = own
        self._collective = collective
        self._links = dict(sorted(links.items()))
        self._generation = generation
        self._watch = RankWatch(self._links, self.abort)
        self._blocks = RankBlocks(
            own, self._links, generation=generation, num_kv_heads=num_kv_heads, timeout_s=timeout_s
        )
        self._last: tuple[int, torch.Tensor] | None = None  # the step that ran last, and what came of it
        self._selected: torch.Tensor | None = None  # its rows for the output
        self._has_begun = False  # the others run these through the output already

    def as_stage(self) -> Stage:
        """For whoever runs a stage; a class by itself, because nothing of `Stage` but its face is wanted."""
        return cast("Stage", self)

    @property
    def names(self) -> list[str]:
        """The members of the other ranks."""
        return [link.peer for link in self._links.values()]

    # Threads of links.

    def takes(self, link: Link, received: Received) -> bool:
        """Whether it is another rank's answer about K/V."""
        return self._blocks.takes(link, received)

    def abort(self, error: ConvoyError) -> None:
        """Whoever waits for another rank here wakes, and raises `StageLost`; also for later orders."""
        self._collective.abort(error)
        self._blocks.end(error)

    def close(self) -> None:
        """The plan is over."""
        self._watch.close()
        self.abort(LinkClosed("the plan is over"))

    # The face of a stage.

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return self._own.block_bytes

    @property
    def model_digest(self) -> str:
        return self._own.model_digest

    @property
    def takes_tokens(self) -> bool:
        return self._own.takes_tokens

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        """Of this rank; the others make theirs with the plan's activation."""
        self._own.make_pools(num_blocks)

    def room_bytes(self, offered_bytes: int) -> int:
        return self._own.room_bytes(offered_bytes)

    def forget(self) -> None:
        self._own.forget()

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """As `Stage.run`, with all ranks. Raises `CollectiveError` where one of them does not do its part."""
        return self._run(step, hidden, tokens, selects=False)

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> Computed:
        """As `Stage.start`. With ``selects`` the owner of the output must `draw` from it next."""
        out = self._run(step, hidden, tokens, selects=selects)
        return Computed(self.select(step, out) if selects else out)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._own.select(step, hidden)
        if self._last is not None and self._last[0] == step.number and hidden is self._last[1]:
            self._selected = rows
        return rows

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `Stage.output`: every rank computes its part of the vocabulary."""
        with self._blaming():
            self._order_output(hidden)
            return self._own.output(hidden)

    def draw(self, hidden: torch.Tensor, draws: Sequence[SampleJob]) -> SampleTask:
        with self._blaming():
            self._order_output(hidden)
            return self._own.draw(hidden, draws)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """As `Stage.read_blocks`, with the K/V heads of all ranks."""
        return self._blocks.read(start, end, blocks)

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """As `Stage.write_blocks`: each rank gets its K/V heads."""
        self._blocks.write(start, blocks, tags, kv)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return self._blocks.shape(num_layers, num_blocks)

    # In the order in which it happens.

    def _run(
        self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None, *, selects: bool
    ) -> torch.Tensor:
        with self._blaming():
            self._has_begun = selects and self.assignment.output
            self._order_step(step, hidden, with_tokens=tokens is not None, output=self._has_begun)
            out = self._own.run(step, hidden, tokens)
            if not step.rows:
                prove(self._collective)
        self._last, self._selected = (step.number, out), None
        return out

    def _order_step(
        self, step: Step, hidden: torch.Tensor | None, *, with_tokens: bool, output: bool
    ) -> None:
        """Draws are this rank's own, and token ids are for stages that look into them."""
        tokens = step.tokens if with_tokens and self._own.takes_tokens else b""
        part = msgspec.structs.replace(step, draws=[], tokens=tokens)
        has_hidden = not self.assignment.embed and hidden is not None
        order = RankStep(part, hidden=has_hidden, output=output)
        self._order(order, step.number, hidden if has_hidden else None)

    def _order_output(self, hidden: torch.Tensor) -> None:
        is_own = hidden is self._selected
        has_begun, self._has_begun = self._has_begun and is_own, False
        if has_begun or not hidden.shape[0]:
            return
        assert self._last is not None, "a step comes before its output"
        number, num_rows = self._last[0], hidden.shape[0]
        self._order(RankOutput(number, num_rows, hidden=not is_own), number, None if is_own else hidden)

    def _order(self, message: Message, number: int, hidden: torch.Tensor | None) -> None:
        tensor = None if hidden is None else to_wire(hidden)
        for rank, link in self._links.items():
            try:
                link.send(message, generation=self._generation, step=number)
                if tensor is not None:
                    boundary = self.assignment.start
                    link.send_tensor(tensor, generation=self._generation, step=number, boundary=boundary)
            except (LinkBroken, LinkClosed) as error:
                public = f"{link.peer} could not be reached"
                raise CollectiveError(f"{public}: {error.message}", rank=rank, public=public) from error

    def _blaming(self) -> _Blaming:
        return _Blaming(self)

    def _fell(self, error: BaseException) -> None:
        """An order failed here: the others must not wait for this rank's part of it."""
        if isinstance(error, CollectiveError):
            self.culprit = self.culprit or named(error, self._links)
        if isinstance(error, ConvoyError):
            self.abort(error)
        else:
            self.abort(StageLost(f"rank 0 failed: {type(error).__name__}"))


class _Blaming:
    """Around an order: others are watched meanwhile, and an order that fails ends the group."""

    def __init__(self, leader: LeaderStage) -> None:
        self._leader = leader

    def __enter__(self) -> None:
        self._leader._watch.begin()

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._leader._watch.end()
        if error is not None:
            self._leader._fell(error)
        else:
            self._leader._collective.rest()
