"""Run a stage step by step: consecutive layers of a model, with embedding and output where owned."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from convoy.config.kernels import INT8_KERNELS, PLAIN, form_of, kv_form, loaded_bits
from convoy.errors import StepError
from convoy.model.backends.host.checks.layers_check import checked_layers
from convoy.model.backends.host.checks.selfcheck import (
    check_heads,
    check_linears,
    check_options,
)
from convoy.model.backends.host.checks.trial import Trial
from convoy.model.backends.host.native_layers import NativeLayers
from convoy.model.backends.host.stage_kv import HostKvStore
from convoy.model.checkpoints.source import ModelSource
from convoy.model.collective import Collective
from convoy.model.kernels.activation import tanh_
from convoy.model.kernels.linear import LEAST_ROWS, PackedLinear, pad_rows
from convoy.model.kernels.pages import ask_huge_pages, lay_together
from convoy.model.kernels.registry import own_form
from convoy.model.kv.pools import BlockTables, StagedStep
from convoy.model.layers.experts import ExactExperts
from convoy.model.layers.layer_inputs import takes_shared_kv
from convoy.model.layers.rope import Rotations
from convoy.model.library import importing
from convoy.model.parallel.ranks import Ranks
from convoy.model.sampling.output_rows import SampleJob, SampleTask, sample_all, with_states
from convoy.model.stage import Computed, LoadedStage, StageOptions
from convoy.model.tensors import check_tokens, select_rows, take_hidden
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.sharding import WHOLE, Shard, rank_spec, settle, share_of
from convoy.wire.messages.control import StageAssignment, Step

if TYPE_CHECKING:
    from convoy.model.checkpoints.stage_tensors import LoadProgress
    from convoy.model.loading.loaded import LoadedModules

_log = logging.getLogger(__name__)


class HostStage:
    """Run the layers of one member, or one rank's slice of them: a `RankSlice`, which explains the methods.

    In exact mode a row's bits depend on its own sequence alone: not on the rows beside it, chunks,
    threads, cuts or a replay.
    """

    overlaps = False
    num_devices = 1

    def __init__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        options: StageOptions,
        modules: LoadedModules,
        shard: Shard = WHOLE,
    ) -> None:
        spec = rank_spec(source.spec, shard.world_size, shard.experts).with_kv_dtype(options.kv_dtype)
        self.assignment = assignment
        self.options = options
        self.hidden_size = spec.num_streams * spec.hidden_size
        self.output_size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.token_id_layers = spec.token_id_layers
        self.weight_bytes = modules.weight_bytes
        self.step_bytes = modules.step_bytes
        self.bytes_read = modules.bytes_read
        self.shard = shard
        self.weight_share = share_of(self.weight_bytes, source.spec, assignment, own_form(options.kernel))
        self._source = (source.digest, source.path)
        self._modules = modules
        self._ranks = modules.ranks
        self._takes_lone_rows = modules.takes_lone_rows
        self._shares = takes_shared_kv(modules.layers.values())
        # Compiled code for all layers, for rows of one token.
        self._native: NativeLayers | None = None
        self._rotations = Rotations(modules.rotary, spec.max_context, is_exact=True)
        self._spec = spec
        self._kv = HostKvStore(
            spec,
            range(assignment.start, assignment.end),
            options.kernel,
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
    ) -> HostStage:
        """Load the assignment's weights, in float32. ``progress`` is called with (loaded, total) bytes.

        ``before`` is the stage that this one replaces. Weights that both own are not read again.
        ``before`` is unusable afterwards, also where this call raises. With a ``shard`` of several ranks
        the result is one rank's slice of the stage, which runs after `join` has connected it to the
        others.

        Sets torch's thread count for the process where ``options.num_threads`` is given. Raises ModelError
        (also for layers that do not run, and for a dtype of K/V that the model or the kernel does not have),
        PlanError for ranks that cannot share these layers, and SelfCheckError if exact mode does not hold for
        the shapes of these linears on this machine.
        """
        shard = settle(source.spec, shard)
        with importing():
            # Imported late: transformers takes seconds to import.
            from convoy.model.loading.load import load_modules, require_codes

        check_options(options.kernel, options.block_size)
        if options.kernel in INT8_KERNELS and not loaded_bits(options.kernel):
            require_codes(source)
        source.spec.with_kv_dtype(kv_form(options.kernel, options.kv_dtype).name)
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        kept = None
        if isinstance(before, HostStage):
            kept = before.give_up_modules(source, options, shard)
        elif before is not None:
            before.give_up()
        packed = options.kernel != PLAIN
        keeps = form_of(own_form(options.kernel)).keeps
        work: dict[str, Any] = {"packed": packed, "keeps": keeps, "bits": loaded_bits(options.kernel)}
        if options.portion_bytes is not None:
            work["portion_bytes"] = options.portion_bytes
        modules = load_modules(source, assignment, kept=kept, progress=progress, shard=shard, **work)
        if options.kernel in INT8_KERNELS:
            modules.round_inputs()
        if packed and modules.bytes_read:
            lay_together(modules.linears)
            ask_huge_pages(weight for linear in modules.linears for weight in linear.packed)
            check_linears(modules.parts())
        stage = cls(source, assignment, options, modules, shard)
        stage._check_and_compile(packed)
        return stage

    def _check_and_compile(self, packed: bool) -> None:
        """Prove what was read, and describe experts and layers to compiled code where weights are packed."""
        if packed:
            self._compile_experts()
        if packed and self._modules.bytes_read:
            check_heads(self._spec.cache_groups)
            if not self._modules.is_ours:
                # Such layers have parts that the other checks do not cover, so they are checked as a whole.
                self._trial.prove()
        if self._modules.bytes_read:
            self._trial.once()
        if packed:
            self._compile_layers()

    @property
    def tables(self) -> BlockTables:
        """Return the block tables. Raises StepError before `make_pools`."""
        return self._kv.tables

    @property
    def modules(self) -> LoadedModules:
        """Return the modules that this stage runs."""
        return self._modules

    def forget(self) -> None:
        self._kv.forget()

    def join(self, collective: Collective) -> None:
        (self._ranks or Ranks(self.shard)).join(collective)

    def give_up(self) -> None:
        self.forget()
        if self._ranks is not None:
            self._ranks.leave()
        self._native = None
        self._modules = self._modules.free()

    def give_up_modules(
        self, source: ModelSource, options: StageOptions, shard: Shard = WHOLE
    ) -> LoadedModules | None:
        """End this stage, and return its modules if a stage with these options can use them."""
        modules = self._modules
        # The next stage lays the weights together anew.
        for _, experts in self._experts:
            experts.leave_compiled()
        self.give_up()
        same = (source.digest, source.path) == self._source and options.kernel == self.options.kernel
        return modules if same and shard == self.shard else None

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        every = [num_blocks] * len(self.block_bytes) if isinstance(num_blocks, int) else num_blocks
        self._kv.make(every)

    def room_bytes(self, offered_bytes: int) -> int:
        return offered_bytes - self.weight_bytes

    @property
    def block_bytes(self) -> tuple[int, ...]:
        return self._kv.block_bytes

    @property
    def block_size(self) -> int:
        return self.options.block_size

    @property
    def model_digest(self) -> str:
        return self._source[0]

    @property
    def takes_tokens(self) -> bool:
        mine = self.assignment
        return mine.embed or self._spec.needs_token_ids(mine.start, mine.end)

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        return self._modules.layers

    @property
    def linears(self) -> Sequence[PackedLinear]:
        """Return the linears of the layers, with `lm_head` last. Empty without exact mode's layers."""
        return self._modules.linears

    def apply(self, step: Step) -> None:
        self._kv.commit(self._kv.tables.stage(step))

    def prepare(self, step: Step) -> None:
        self._kv.tables.prepare(step)

    @torch.inference_mode()
    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        # A thread that has not computed yet adopts the process's thread count only when it is asked for the
        # count.
        torch.get_num_threads()
        staged = self._kv.tables.stage(step)
        num_tokens = sum(row.num_tokens for row in step.rows)
        if self.takes_tokens:
            check_tokens(tokens, num_tokens, self.vocab_size)
        if self._ranks is not None:
            self._ranks.begin(num_tokens)
        looks_up = self.assignment.embed
        x = self._embed(tokens) if looks_up else take_hidden(hidden, num_tokens, self.hidden_size)
        # Commit only after all checks, so a refused step changes nothing.
        self._kv.commit(staged)
        if not num_tokens or not self._modules.layers:
            return x
        return self._run_layers(x, staged, tokens)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        return select_rows(step, hidden)

    @torch.inference_mode()
    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return all ranks' logits at rank 0. The other ranks get their part."""
        part = self.output_part(hidden)
        if self._ranks is None or not part.shape[0]:
            return part
        return self._ranks.gather(part, self.vocab_size)

    @torch.inference_mode()
    def output_part(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits of this rank's part of the vocabulary.

        The parts are equally wide on all ranks.
        """
        norm, head = self._modules.norm, self._modules.output
        if norm is None or head is None:
            raise StepError("this stage does not own the output")
        hidden = take_hidden(hidden, hidden.shape[0], self.hidden_size)
        if not hidden.shape[0]:
            return torch.empty(0, self._spec.vocabulary_rows)
        num_rows = hidden.shape[0]
        logits: torch.Tensor = head(norm(self._padded(hidden)))
        scale, cap = self._modules.logit_scale, self._modules.logit_cap
        if scale is not None:
            logits = logits * scale
        if cap is not None:
            logits = tanh_(logits / cap).mul_(cap)
        return logits[:num_rows]

    @torch.inference_mode()
    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        norm = self._modules.norm
        if norm is None:
            raise StepError("this stage does not own the output")
        hidden = take_hidden(hidden, hidden.shape[0], self.hidden_size)
        state: torch.Tensor = norm(self._padded(hidden))
        return state[: hidden.shape[0]].float()

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> SampleTask:
        results = sample_all(self.output(hidden).numpy(), jobs)
        return SampleTask(with_states(results, jobs, lambda rows: self.final_state(hidden[rows]).numpy()))

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

    @torch.inference_mode()
    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        return self._kv.read_blocks(start, end, blocks)

    @torch.inference_mode()
    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        self._kv.write_blocks(start, blocks, tags, kv)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        return self._kv.carried_shape(num_layers, num_blocks)

    def _embed(self, tokens: torch.Tensor | None) -> torch.Tensor:
        if self._modules.embedding is None:
            raise StepError("this stage does not own the embedding")
        rows: torch.Tensor = self._modules.embedding(tokens)
        scale = self._modules.embed_scale
        rows = rows.to(torch.float32)
        if self._spec.num_streams > 1:
            rows = rows.repeat(1, self._spec.num_streams)
        return rows if scale is None else rows * scale

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        if self.options.kernel == PLAIN:
            return x
        return pad_rows(x, self.least_rows)

    @property
    def least_rows(self) -> int:
        """Return the fewest rows that the layers are given.

        With torch's operators a lone row would have other bits.
        """
        if self._takes_lone_rows:
            return 1
        return LEAST_ROWS

    def _compile_experts(self) -> None:
        """Run the experts of few rows on compiled code where its bits are those of one after the other."""
        for number, experts in self._experts:
            if why := experts.use_compiled():
                _log.debug("layer %d runs its experts one by one: %s", number, why)

    @property
    def _experts(self) -> Iterator[tuple[int, ExactExperts]]:
        """Yield the experts of each layer, with the layer's number."""
        for number, layer in self.layers.items():
            yield from ((number, part) for part in layer.modules() if isinstance(part, ExactExperts))

    def _compile_layers(self) -> None:
        """Run whole layers on compiled code for few rows, where its bits are those of the parts."""
        form = FAMILIES[self._spec.family].layer_form
        # Ranks add their parts of a sum between the parts of a layer.
        if form is not None and self._ranks is None:
            self._native = checked_layers(
                self.layers, form, self._modules.ropes, self._rotations, self._spec.cache_groups
            )

    def _run_layers(
        self, x: torch.Tensor, staged: StagedStep, tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run all layers on [T, hidden]. Returns the same shape."""
        modules, num_tokens = self._modules, len(x)
        batch = self._kv.describe(staged.rows, self._rotations)
        native = self._native
        if native is not None and not native.can_run(num_tokens, batch):
            native = None
        # Compiled code has the same bits for a lone row.
        if native is None or native.numbers != modules.layers.keys():
            x = self._padded(x)
        positions: list[int] = []
        for row, _ in staged.rows:
            positions.extend(range(row.start, row.start + row.num_tokens))
        # Padding rows repeat the last position; their results are cut off.
        positions.extend(positions[-1:] * (x.shape[0] - len(positions)))
        ropes = self._rotations.look_up(
            modules.ropes.values(), torch.tensor(positions, dtype=torch.int64), max(positions)
        )
        rotations = {number: ropes[modules.ropes[number]] for number in modules.layers}
        arguments = self._layer_arguments(batch, tokens)
        for compiled, some in itertools.groupby(
            modules.layers.items(), lambda one: native is not None and one[0] in native.numbers
        ):
            if compiled and native is not None:
                x = native.run([number for number, _ in some], x, rotations, batch)
                continue
            for number, layer in some:
                x = layer(x[None], position_embeddings=rotations[number], **arguments(number))[0]
        return x[:num_tokens]

    def _layer_arguments(
        self, batch: Mapping[int, Any], tokens: torch.Tensor | None
    ) -> Callable[[int], dict[str, Any]]:
        """Return the arguments of a layer that runs part by part, by its number."""
        modules = self._modules
        # A layer that shares K/V reads the pool of its source layer.
        batch = {**batch, **{layer: batch[of] for layer, of in self._spec.kv_sources.items() if of in batch}}
        common: dict[str, Any] = {"use_cache": False, "batch": batch}
        if self._shares:
            # Filled by the layers with K and V that later layers read.
            common["shared_kv_states"] = {}
        inputs: dict[int, torch.Tensor] = {}
        if modules.layer_inputs is not None and tokens is not None:
            inputs = modules.layer_inputs(self._padded(tokens))
        ids = None if tokens is None or self._spec.layer_input_size else self._padded(tokens)

        def arguments(number: int) -> dict[str, Any]:
            own = dict(common)
            if number in inputs:
                own["per_layer_input"] = inputs[number]
            if ids is not None and number in self.token_id_layers:
                own["input_ids"] = ids
            return own

        return arguments

    @property
    def _trial(self) -> Trial:
        """Return a trial of the layers, and of the output where it is here. It leaves no pools behind."""
        return Trial(
            self._spec,
            self.hidden_size,
            self.options.block_size,
            self.make_pools,
            self.forget,
            lambda x, staged, tokens: self._run_layers(x, staged, tokens) if self.layers else x,
            self.output_part if self.assignment.output else None,
        )
