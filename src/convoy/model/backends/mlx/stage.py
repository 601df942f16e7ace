"""Run a stage on MLX: consecutive layers of a model, with embedding and output where owned."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np
import torch
from torch import nn

from convoy.config.kernels import AUTO, MLX_KERNELS, form_of, kv_form
from convoy.errors import ModelError, StepError, TooLittleMemory
from convoy.model.backends.mlx.arrays import DTYPES, OwnerThread, to_mlx, to_torch
from convoy.model.backends.mlx.assemble import MlxWeights, load_weights
from convoy.model.backends.mlx.kv import MlxKvStore
from convoy.model.backends.mlx.layers.layer import MlxLayer
from convoy.model.backends.mlx.ranks import MlxRanks
from convoy.model.backends.mlx.supported import check_slices, check_supported
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Collective
from convoy.model.mlx_device import memory_bytes, set_wired_limit
from convoy.model.sampling.output_rows import SampleJob, SampleTask, sample_all, with_states
from convoy.model.stage import Computed, LoadedStage, StageOptions
from convoy.model.tensors import check_hidden, check_tokens, select_rows
from convoy.plan.spec.sharding import WHOLE, Shard, rank_spec, settle, share_of
from convoy.wire.messages.control import StageAssignment, Step

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress
    from convoy.model.kv.pools import StagedStep

_log = logging.getLogger(__name__)
# A step with more rows is evaluated layer by layer, so that no command buffer of Metal runs long.
_ROWS_AT_ONCE = 64


class MlxStage:
    """Run the layers of one member, or one rank's slice of them: a `RankSlice`, which explains the methods.

    A row's bits may depend on the rows beside it. With equal rows in each step they depend on no cut.
    """

    overlaps = False
    num_devices = 1

    def __init__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        weights: MlxWeights,
        owner: OwnerThread,
        *,
        shard: Shard = WHOLE,
    ) -> None:
        spec = rank_spec(source.spec, shard.world_size, shard.experts)
        dtype = form_of(options.kernel).dtype
        self.assignment = assignment
        self.options = options
        self.hidden_size = spec.hidden_size
        self.output_size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.token_id_layers = spec.token_id_layers
        self.takes_tokens = assignment.embed
        self.block_size = options.block_size
        self.model_digest = source.digest
        self.weight_bytes = weights.num_bytes
        self.bytes_read = weights.bytes_read
        self.shard = shard
        self.weight_share = share_of(self.weight_bytes, source.spec, assignment, options.kernel)
        self._path = source.path
        self._dtype = DTYPES[dtype]
        self._weights: MlxWeights | None = weights
        self._owner = owner
        self._ranks = ranks = MlxRanks(shard)
        self._layers = {number: MlxLayer(layer, ranks.add) for number, layer in weights.layers.items()}
        self._rotations = weights.rotations
        self._kv = MlxKvStore(
            spec,
            range(assignment.start, assignment.end),
            dtype,
            block_size=options.block_size,
            require_tags=options.require_tags,
        )

    @classmethod
    def load(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None = None,
        *,
        before: LoadedStage | None = None,
        shard: Shard | None = None,
    ) -> MlxStage:
        """Load the assignment's weights. ``progress`` is called with (loaded, total) bytes.

        With a ``shard`` of several ranks the result is one rank's slice of the stage, which runs after `join`
        has connected it to the others.

        Raises ModelError for a kernel, a dtype of K/V, a family or a form of weights that MLX does not run,
        PlanError for ranks that cannot share these layers, and TooLittleMemory for weights that MLX's memory
        does not hold; all before weights are read.
        """
        _check_options(options)
        check_supported(source)
        shard = settle(source.spec, shard)
        check_slices(source, assignment, shard)
        kept, owner = None, None
        if isinstance(before, MlxStage):
            kept, owner = before._give_up_weights(source, options, shard)
        elif before is not None:
            before.give_up()
        owner = owner or OwnerThread()
        try:
            owner.run(_check_room, source, assignment, options.kernel, kept, shard)
            if reason := owner.run(set_wired_limit):
                _log.warning("%s", reason)
            dtype = form_of(options.kernel).dtype
            weights = owner.run(load_weights, source, assignment, dtype, progress, kept, shard=shard)
        except BaseException:
            owner.end()
            raise
        return cls(source, assignment, options, weights, owner, shard=shard)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return self._kv.block_bytes

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        return self._layers

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        every = [num_blocks] * len(self.block_bytes) if isinstance(num_blocks, int) else num_blocks
        self._owner.run(self._kv.make, every)

    def room_bytes(self, offered_bytes: int) -> int:
        return offered_bytes - self.weight_bytes

    def join(self, collective: Collective) -> None:
        self._ranks.join(collective)

    def forget(self) -> None:
        self._owner.run(self._kv.forget)

    def give_up(self) -> None:
        if self._weights is not None:
            self._drop()
            self._owner.end()

    def _drop(self) -> None:
        self.forget()
        self._ranks.leave()
        self._weights = None
        self._layers = {}

    def _give_up_weights(
        self, source: ModelSource, options: StageOptions, shard: Shard
    ) -> tuple[MlxWeights | None, OwnerThread | None]:
        """End this stage; return its weights and their thread if a stage with these options can use them."""
        weights = self._weights
        same = (source.digest, source.path) == (self.model_digest, self._path)
        same = same and shard == self.shard
        if weights is None or not same or options.kernel != self.options.kernel:
            self.give_up()
            return None, None
        self._drop()
        return weights, self._owner

    def apply(self, step: Step) -> None:
        tables = self._kv.tables
        staged = tables.stage(step)
        tables.commit(staged)
        self._owner.run(self._kv.copy_states, staged.copies)

    def prepare(self, step: Step) -> None:
        self._kv.tables.prepare(step)

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        tables = self._kv.tables
        staged = tables.stage(step)
        num_tokens = sum(row.num_tokens for row in step.rows)
        if self.takes_tokens:
            check_tokens(tokens, num_tokens, self.vocab_size)
            given = tokens
        else:
            given = check_hidden(hidden, num_tokens, self.hidden_size)
        assert given is not None, "both checks refuse None"
        self._ranks.begin(num_tokens)
        # Commit only after all checks, so a refused step changes nothing.
        tables.commit(staged)
        return self._owner.run(self._compute, staged, given)

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> Computed:
        out = self.run(step, hidden, tokens)
        return Computed(self.select(step, out) if selects else out)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        return select_rows(step, hidden)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._owner.run(self._logits, self._checked(hidden))

    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._owner.run(self._normed, self._checked(hidden))

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> SampleTask:
        results = sample_all(self.output(hidden).numpy(), jobs)
        return SampleTask(with_states(results, jobs, lambda rows: self.final_state(hidden[rows]).numpy()))

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        return self._owner.run(self._kv.read_blocks, start, end, blocks)

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        self._owner.run(self._kv.write_blocks, start, blocks, tags, kv)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return self._kv.carried_shape(num_layers, num_blocks)

    def _checked(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._weights is None or self._weights.head is None:
            raise StepError("this stage does not own the output")
        return check_hidden(hidden, hidden.shape[0], self.hidden_size)

    # The owner's thread alone calls the rest.

    def _compute(self, staged: StagedStep, given: torch.Tensor) -> torch.Tensor:
        """Return the hidden states of the step's rows behind this stage's layers, [T, hidden_size]."""
        self._kv.copy_states(staged.copies)
        weights = self._weights
        if weights is None:
            raise StepError("this stage has ended")
        if not self.takes_tokens:
            x = to_mlx(given, self._dtype)
        elif weights.embedding is None:
            raise StepError("this stage does not own the embedding")
        elif not len(given):
            x = mx.zeros((0, self.hidden_size), self._dtype)
        else:
            rows = self._ranks.look_up(weights.embedding, to_mlx(given), self._dtype)
            x = rows * weights.embedding_scale
        if not len(given) or not self._layers:
            return to_torch(x)
        memories = self._kv.describe(staged.rows)
        spans = [np.arange(row.start, row.start + row.num_tokens) for row, _ in staged.rows]
        rotations = self._rotations.look_up(np.concatenate(spans))
        # By key and in order: `layers` may be any mapping.
        for number in range(self.assignment.start, self.assignment.end):
            x = self._layers[number](x, memories[number], rotations.get(number))
            if len(given) > _ROWS_AT_ONCE:
                mx.eval(x)
        return to_torch(x)

    def _normed(self, hidden: torch.Tensor) -> torch.Tensor:
        return to_torch(self._final(hidden).astype(mx.float32))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self._weights
        assert weights is not None, "`_checked` was not asked"
        assert weights.head is not None, "`_checked` was not asked"
        if not len(hidden):
            return torch.empty(0, weights.head.arrays[0].shape[0])
        logits = weights.head.multiply(self._final(hidden)).astype(mx.float32)
        if weights.logits_cap:
            logits = mx.tanh(logits / weights.logits_cap) * weights.logits_cap
        return self._ranks.gather(to_torch(logits), self.vocab_size)

    def _final(self, hidden: torch.Tensor) -> mx.array:
        weights = self._weights
        assert weights is not None, "`_checked` was not asked"
        assert weights.norm is not None, "`_checked` was not asked"
        return mx.fast.rms_norm(to_mlx(hidden, self._dtype), weights.norm, weights.eps)


def _check_options(options: StageOptions) -> None:
    """Raise ModelError for a kernel, or a dtype of K/V, that no stage on MLX has."""
    if options.kernel not in MLX_KERNELS:
        raise ModelError(f"kernel {options.kernel!r} does not run on mlx, expected {', '.join(MLX_KERNELS)}")
    own = kv_form(options.kernel).name
    if options.kv_dtype not in {AUTO, own}:
        raise ModelError(
            f"kv_dtype is {options.kv_dtype}, and a stage on MLX with {options.kernel} holds K/V as {own}",
            hint="leave kv_dtype at auto",
        )


def _check_room(
    source: ModelSource, assignment: StageAssignment, kernel: str, kept: MlxWeights | None, shard: Shard
) -> None:
    """Raise TooLittleMemory if MLX's memory does not hold the stage's weights beside those that are kept."""
    needed = rank_spec(source.spec, shard.world_size, shard.experts).weight_bytes(
        assignment.start, assignment.end, embed=assignment.embed, output=assignment.output, dtype=kernel
    )
    room = memory_bytes() + (0 if kept is None else kept.num_bytes)
    if needed > room:
        raise TooLittleMemory(
            f"{source.name}: layers {assignment.start} to {assignment.end - 1} take {needed} bytes, and MLX "
            f"may use {room} on this machine",
            hint="give this member fewer layers, or end other programs",
            room_bytes=room,
        )
