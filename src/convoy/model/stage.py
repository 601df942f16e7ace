"""A stage: consecutive layers of a model, with embedding and output where owned, run one step at a time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from convoy.errors import ModelError, PlanError, StepError
from convoy.model.attention import LayerBatch
from convoy.model.kv import BlockTables, KvPool, StagedStep
from convoy.model.library import LIBRARY
from convoy.model.linear import pad_rows
from convoy.model.packed import KEY_BLOCK, HeadShape, describe_group
from convoy.model.rope import RopeTable, spread_over_heads
from convoy.model.selfcheck import EXACT, PLAIN, check_heads, check_linears, least_tile_rows
from convoy.model.source import ModelSource
from convoy.wire.messages import StageAssignment, Step

if TYPE_CHECKING:
    from convoy.model.load import LoadedModules, LoadProgress

MAX_CARRIED_BYTES = 64 * 1024 * 1024  # of K/V that is read or written at once


@dataclass(frozen=True)
class StageOptions:
    """How a stage computes. ``num_threads`` is set for the whole process, at load; None leaves torch's.

    Without ``require_tags`` it takes rows that name no prefix, from whoever runs one stage by itself.
    """

    kernel: str = EXACT
    block_size: int = 16  # tokens
    device: str = "cpu"
    num_threads: int | None = None
    require_tags: bool = True


class Stage:
    """The layers of one member. Not thread-safe: one thread runs its steps, in order.

    In exact mode a row's bits depend on its own sequence alone: not on the rows beside it, chunks, threads,
    cuts or a replay.
    """

    def __init__(
        self, source: ModelSource, assignment: StageAssignment, options: StageOptions, modules: LoadedModules
    ) -> None:
        spec = source.spec
        self.assignment = assignment
        self.options = options
        self.hidden_size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.weight_bytes = modules.weight_bytes
        self.bytes_read = modules.bytes_read
        self.block_bytes = options.block_size * spec.kv_token_bytes(
            assignment.start, assignment.end, "float32"
        )
        self._source = (source.digest, source.path)
        self._modules = modules
        self._rope = RopeTable(modules.rotary, spec.max_context)
        self._spec = spec
        self._least_rows = least_tile_rows(spec.head_dim)
        self._shapes: list[HeadShape] = []
        self._layer_group = {layer: i for i, group in enumerate(spec.cache_groups) for layer in group.layers}
        self._tables: BlockTables | None = None
        self._pools: dict[int, KvPool] = {}

    @classmethod
    def load(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        progress: LoadProgress | None = None,
        *,
        before: Stage | None = None,
    ) -> Stage:
        """Load the assignment's weights, in float32; ``progress`` is called with (loaded, total) bytes.

        ``before`` is the stage that this one takes the place of: what both own is not read again. It is over
        then, also where this raises.

        Sets torch's thread count for the process where ``options.num_threads`` is given. Raises ModelError,
        and SelfCheckError if exact mode does not hold for the shapes of these linears on this machine.
        """
        with LIBRARY:
            from convoy.model.load import load_modules  # transformers, which takes seconds, and not before

        if options.kernel not in {EXACT, PLAIN}:
            raise ModelError(f"kernel {options.kernel!r} is not known, expected {EXACT} or {PLAIN}")
        if options.device != "cpu":
            raise ModelError(f"device {options.device!r} is not supported, expected cpu")
        if options.block_size < 1 or KEY_BLOCK % options.block_size:
            raise ModelError(f"block size {options.block_size} does not divide {KEY_BLOCK}")
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        kept = None if before is None else before.give_up(source, options)
        packed = options.kernel == EXACT
        modules = load_modules(source, assignment, packed=packed, progress=progress, kept=kept)
        if packed and modules.bytes_read:
            check_linears(modules.parts())
            check_heads(source.spec.num_heads, source.spec.num_kv_heads, source.spec.head_dim)
        return cls(source, assignment, options, modules)

    def forget(self) -> None:
        """Free the K/V pools; steps are refused until there are new ones."""
        self._pools, self._tables = {}, None

    def give_up(self, source: ModelSource, options: StageOptions) -> LoadedModules | None:
        """This stage is over: its modules, where one with these options can use them."""
        self.forget()
        modules = self._modules
        self._modules = replace(
            modules, layers={}, embedding=None, norm=None, output=None, fused_attention=False
        )
        same = (source.digest, source.path) == self._source and options.kernel == self.options.kernel
        return modules if same else None

    def make_pools(self, num_blocks: int) -> None:
        """Forget all sequences and make K/V pools of ``num_blocks`` blocks. Raises StepError, PlanError."""
        if num_blocks < 1:
            raise StepError(f"pools of {num_blocks} blocks make no sense, expected at least 1")
        spec = self._spec
        self._shapes = [
            HeadShape(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                self.options.block_size,
                num_blocks,
                group.window,
                self._least_rows,
            )
            for group in spec.cache_groups
        ]
        self._tables = BlockTables(
            num_groups=len(self._shapes),
            num_blocks=num_blocks,
            block_size=self.options.block_size,
            max_context=spec.max_context,
            require_tags=self.options.require_tags,
        )
        self._pools = {}
        try:
            for layer in self._modules.layers:
                shape = self._shapes[self._layer_group[layer]]
                self._pools[layer] = KvPool(num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        except (RuntimeError, MemoryError, TypeError, ValueError) as error:  # what is raised for too much
            self._pools, self._tables = {}, None
            raise PlanError(
                f"{num_blocks} K/V blocks of {self.block_bytes} bytes do not fit in this machine's memory",
                hint="lower num_blocks or memory_gb",
            ) from error

    @property
    def model_digest(self) -> str:
        return self._source[0]

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The layers here, by their number in the whole model."""
        return self._modules.layers

    def apply(self, step: Step) -> None:
        """Releases, grants and the rows' new lengths, all or nothing, without a run. Raises StepError."""
        tables = self._need_tables()
        tables.commit(tables.stage(step))

    @torch.inference_mode()
    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Apply the step and run its rows: [T, hidden_size] after this stage's layers.

        The owner of the embedding takes ``tokens`` (int64 [T]), others ``hidden`` (float32 [T, hidden_size]).
        Raises StepError for what makes no sense, before anything is changed.
        """
        tables = self._need_tables()
        # a thread that has not computed yet takes over the process's thread count when it is asked for it
        torch.get_num_threads()
        staged = tables.stage(step)
        num_tokens = sum(row.num_tokens for row in step.rows)
        x = self._embed(tokens, num_tokens) if self.assignment.embed else self._take(hidden, num_tokens)
        tables.commit(staged)
        if not num_tokens or not self._modules.layers:
            return x
        padded = pad_rows(x) if self.options.kernel == EXACT else x
        return self._run_layers(padded, staged)[:num_tokens]

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that go on to the output: each row's ``num_outputs`` trailing positions, in row order."""
        wanted: list[int] = []
        end = 0
        for row in step.rows:
            end += row.num_tokens
            wanted.extend(range(end - row.num_outputs, end))
        if hidden.shape[0] != end:
            raise StepError(f"a step of {end} tokens has a hidden state of {hidden.shape[0]} rows")
        if len(wanted) == end:
            return hidden
        return hidden.index_select(0, torch.tensor(wanted, dtype=torch.int64))

    @torch.inference_mode()
    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and `lm_head`: [M, hidden_size] to float32 logits [M, vocab_size]."""
        norm, head = self._modules.norm, self._modules.output
        if norm is None or head is None:
            raise StepError("this stage does not own the output")
        hidden = self._take(hidden, hidden.shape[0])
        if not hidden.shape[0]:
            return torch.empty(0, self.vocab_size)
        num_rows = hidden.shape[0]
        padded = pad_rows(hidden) if self.options.kernel == EXACT else hidden
        logits: torch.Tensor = head(norm(padded))
        return logits[:num_rows]

    @torch.inference_mode()
    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """The K/V of ``blocks`` in layers [start, end): float32 [layers, 2, positions, kv_heads, head_dim].

        Raises StepError for what this stage does not have, and for more than MAX_CARRIED_BYTES.
        """
        self._need_tables().check_blocks(blocks)
        mine = self.assignment
        if not mine.start <= start < end <= mine.end:
            raise StepError(
                f"layers [{start}, {end}) are asked for, and this stage has [{mine.start}, {mine.end})"
            )
        self.kv_shape(end - start, len(blocks))
        index = torch.tensor(blocks, dtype=torch.int64)
        return torch.stack([self._pools[layer].read_blocks(index) for layer in range(start, end)])

    @torch.inference_mode()
    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks``, which no sequence has, in layers from ``start`` on; ``kv`` as `read_blocks` gives.

        They hold the prefixes of ``tags`` once the last layer here is among them, and no prefix before: so
        layers come in order. Raises StepError; nothing is changed then.
        """
        tables, mine = self._need_tables(), self.assignment
        end = start + (kv.shape[0] if kv.dim() else 0)
        if not mine.start <= start < end <= mine.end:
            raise StepError(
                f"K/V of layers [{start}, {end}) came, and this stage has [{mine.start}, {mine.end})"
            )
        expected = self.kv_shape(end - start, len(blocks))
        if kv.shape != expected or kv.dtype != torch.float32:
            raise StepError(
                f"K/V came as {kv.dtype} of shape {list(kv.shape)}, expected float32 of {list(expected)}"
            )
        tables.fill(blocks, tags, whole=end == mine.end)
        index = torch.tensor(blocks, dtype=torch.int64)
        for layer in range(start, end):
            self._pools[layer].write_blocks(index, kv[layer - start])

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Of what `read_blocks` gives. Raises StepError for more than MAX_CARRIED_BYTES."""
        spec, size = self._spec, self.options.block_size
        shape = (num_layers, 2, num_blocks * size, spec.num_kv_heads, spec.head_dim)
        if 4 * math.prod(shape) > MAX_CARRIED_BYTES:
            raise StepError(f"{num_blocks} blocks of {num_layers} layers are over {MAX_CARRIED_BYTES} bytes")
        return shape

    def _need_tables(self) -> BlockTables:
        if self._tables is None:
            raise StepError("a step came before the pools were made")
        return self._tables

    def _embed(self, tokens: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        if tokens is None or tokens.shape != (num_tokens,):
            found = "no tokens" if tokens is None else f"tokens of shape {list(tokens.shape)}"
            raise StepError(f"a step of {num_tokens} tokens came with {found}")
        if num_tokens and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
            raise StepError(f"a step has a token outside the vocabulary of {self.vocab_size}")
        if self._modules.embedding is None:
            raise StepError("this stage does not own the embedding")
        rows: torch.Tensor = self._modules.embedding(tokens)
        return rows.to(torch.float32)

    def _take(self, hidden: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        if hidden is None or hidden.shape != (num_tokens, self.hidden_size) or hidden.dtype != torch.float32:
            found = "nothing" if hidden is None else f"{hidden.dtype} of shape {list(hidden.shape)}"
            raise StepError(
                f"expected a float32 hidden state of [{num_tokens}, {self.hidden_size}], got {found}"
            )
        return hidden

    def _run_layers(self, x: torch.Tensor, staged: StagedStep) -> torch.Tensor:
        positions: list[int] = []
        for row, _ in staged.rows:
            positions.extend(range(row.start, row.start + row.num_tokens))
        positions.extend(positions[-1:] * (x.shape[0] - len(positions)))
        rope = self._rope.look_up(torch.tensor(positions, dtype=torch.int64), max(positions))
        if self._modules.fused_attention:
            spec = self._spec
            rope = spread_over_heads(
                *rope,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                scaling=spec.head_dim**-0.5,
            )
        groups = [describe_group(staged.rows, i, shape) for i, shape in enumerate(self._shapes)]
        batch = {
            layer: LayerBatch(groups[self._layer_group[layer]], pool) for layer, pool in self._pools.items()
        }
        x = x[None]
        for layer in self._modules.layers.values():
            x = layer(x, position_embeddings=rope, use_cache=False, batch=batch)
        return x[0]
