"""Rank 0 of a stage that several members hold; the stage's user sees a stage like any other.

Each order goes to the other ranks first, in their links' order, and then runs here too. So every rank runs
the same orders: an order is sent only when nothing is left but to run it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import torch

from convoy.engine.ranks.blocks import RankBlocks
from convoy.engine.ranks.rank_collective import RankCollective, named, prove
from convoy.engine.ranks.watch import RankWatch
from convoy.engine.run.kv_client import KvClient
from convoy.errors import CollectiveError, ConvoyError, LinkBroken, LinkClosed, StageLost
from convoy.model.sampling.output_rows import SampleJob
from convoy.model.stage import Computed, PendingSamples, Stage
from convoy.model.tensors import to_wire
from convoy.transport.link.link import Link
from convoy.wire.messages.control import Message, StageAssignment, Step
from convoy.wire.messages.ranks import RankOutput, RankStep


class LeaderStage:
    """Present this rank's slice and the other ranks as one `Stage`.

    ``links`` leads to the other ranks, by rank. One thread runs the stage; any thread may call
    `kv_client` and `abort`. ``own`` has joined ``collective``. ``num_kv_heads`` counts those of the whole
    model. ``timeout_s`` is the time allowed for K/V of another rank, on top of the time for its bytes.
    ``culprit`` is the member of the rank that made a step fail here.
    """

    overlaps = False
    num_devices = 1

    def __init__(
        self,
        own: Stage,
        collective: RankCollective,
        links: Mapping[int, Link],
        *,
        plan_id: int,
        num_kv_heads: int,
        timeout_s: float,
    ) -> None:
        self.culprit: str | None = None
        self.assignment: StageAssignment = own.assignment
        self.hidden_size = own.hidden_size
        self.output_size = own.output_size
        self.vocab_size = own.vocab_size
        self.token_id_layers = own.token_id_layers
        self.weight_bytes = own.weight_bytes
        self.bytes_read = own.bytes_read
        self._own = own
        self._collective = collective
        self._links = dict(sorted(links.items()))
        self._plan_id = plan_id
        self._watch = RankWatch(self._links, self.abort)
        self._blocks = RankBlocks(
            own, self._links, plan_id=plan_id, num_kv_heads=num_kv_heads, timeout_s=timeout_s
        )
        # The number of the step that ran last, and its hidden states.
        self._last: tuple[int, torch.Tensor] | None = None
        # The rows of that step for the output.
        self._selected: torch.Tensor | None = None
        # Whether the other ranks compute the output of these rows already.
        self._has_begun = False

    @property
    def names(self) -> list[str]:
        """Return the members of the other ranks."""
        return [link.peer for link in self._links.values()]

    # Threads of links.

    def kv_client(self, link: Link) -> KvClient | None:
        """Return the client that exchanges K/V over ``link``; None if no rank is at its end."""
        return self._blocks.client(link)

    def abort(self, error: ConvoyError) -> None:
        """Wake every thread that waits for another rank here; it and later orders raise `StageLost`."""
        self._collective.abort(error)
        self._blocks.end(error)

    def close(self) -> None:
        """End the watch and the collective with the plan."""
        self._watch.close()
        self.abort(LinkClosed("the plan is over"))

    # The members of `Stage`.

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
        """Make this rank's pools; the other ranks make theirs when the plan is activated."""
        self._own.make_pools(num_blocks)

    def room_bytes(self, offered_bytes: int) -> int:
        return self._own.room_bytes(offered_bytes)

    def forget(self) -> None:
        self._own.forget()

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Run a step as `Stage.run` does, with all ranks.

        Raises `CollectiveError` if one of them fails its part.
        """
        return self._run(step, hidden, tokens, selects=False)

    def prepare(self, step: Step) -> None:
        """Do nothing: all ranks take the step at once."""

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> Computed:
        """Start a step as `Stage.start` does.

        With ``selects``, the owner of the output must `sample` from it next.
        """
        out = self._run(step, hidden, tokens, selects=selects)
        return Computed(self.select(step, out) if selects else out)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        rows = self._own.select(step, hidden)
        if self._last is not None and self._last[0] == step.number and hidden is self._last[1]:
            self._selected = rows
        return rows

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits as `Stage.output` does; every rank computes its part of the vocabulary."""
        with self._watching():
            self._order_output(hidden)
            return self._own.output(hidden)

    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `Stage.final_state`. Every rank has the whole norm, so this one computes it alone."""
        return self._own.final_state(hidden)

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> PendingSamples:
        with self._watching():
            self._order_output(hidden)
            return self._own.sample(hidden, jobs)

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of `Stage.read_blocks` with the heads of all ranks."""
        return self._blocks.read(start, end, blocks)

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Write K/V as `Stage.write_blocks` does; each rank gets its own heads."""
        self._blocks.write(start, blocks, tags, kv)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return self._blocks.shape(num_layers, num_blocks)

    # In the order in which it happens.

    def _run(
        self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None, *, selects: bool
    ) -> torch.Tensor:
        with self._watching():
            # One message orders the step and its output, which saves a round of messages.
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
        """Send a step to the other ranks, without sampling jobs.

        Sampling is rank 0's own work. Token ids go only to stages that need them.
        """
        tokens = step.tokens if with_tokens and self._own.takes_tokens else b""
        part = msgspec.structs.replace(step, samples=[], tokens=tokens)
        has_hidden = not self.assignment.embed and hidden is not None
        order = RankStep(part, hidden=has_hidden, output=output)
        self._order(order, step.number, hidden if has_hidden else None)

    def _order_output(self, hidden: torch.Tensor) -> None:
        is_own = hidden is self._selected
        has_begun, self._has_begun = self._has_begun and is_own, False
        # The other ranks have begun already, or there is nothing to compute.
        if has_begun or not hidden.shape[0]:
            return
        assert self._last is not None, "a step comes before its output"
        number, num_rows = self._last[0], hidden.shape[0]
        self._order(RankOutput(number, num_rows, hidden=not is_own), number, None if is_own else hidden)

    def _order(self, message: Message, number: int, hidden: torch.Tensor | None) -> None:
        tensor = None if hidden is None else to_wire(hidden)
        for rank, link in self._links.items():
            try:
                link.send(message, plan_id=self._plan_id, step=number)
                if tensor is not None:
                    boundary = self.assignment.start
                    link.send_tensor(tensor, plan_id=self._plan_id, step=number, boundary=boundary)
            except (LinkBroken, LinkClosed) as error:
                public = f"{link.peer} could not be reached"
                raise CollectiveError(f"{public}: {error.message}", rank=rank, public=public) from error

    def _watching(self) -> _WatchedOrder:
        return _WatchedOrder(self)

    def _end_collective(self, error: BaseException) -> None:
        """End the collective after a failed order, so that no other rank waits for this rank's part."""
        if isinstance(error, CollectiveError):
            self.culprit = self.culprit or named(error, self._links)
        if isinstance(error, ConvoyError):
            self.abort(error)
        else:
            self.abort(StageLost(f"rank 0 failed: {type(error).__name__}"))


class _WatchedOrder:
    """Watch the other ranks during an order; a failed order ends the collective."""

    def __init__(self, leader: LeaderStage) -> None:
        self._leader = leader

    def __enter__(self) -> None:
        self._leader._watch.begin()

    def __exit__(self, _type: object, error: BaseException | None, _trace: object) -> None:
        self._leader._watch.end()
        if error is not None:
            self._leader._end_collective(error)
        else:
            self._leader._collective.rest()
