"""Run a stage on a CUDA device: bfloat16 weights and K/V pools, captured decodes, plain prefills.

The class implements `Stage`. Hidden states leave it in bfloat16 on the host. Between the last layer and
the output of one stage they stay on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from convoy.config.table import MAX_STEP_TOKENS
from convoy.errors import ModelError, PlanError, StepError
from convoy.model.backends.cuda.batch import CheckedStep, DeviceBatch, HostBatch, describe_rows, on_device
from convoy.model.backends.cuda.decoder import DeviceDecoder
from convoy.model.backends.cuda.device_model import Model
from convoy.model.backends.cuda.graphs import DecodeGraph, DecodeGraphs, GraphShape
from convoy.model.backends.cuda.kernels.sums import DeviceSums
from convoy.model.backends.cuda.loading import load_model
from convoy.model.backends.cuda.memory.pending import PendingResult
from convoy.model.backends.cuda.memory.pools import CarriesKv, DevicePools
from convoy.model.backends.cuda.memory.staging import Staging
from convoy.model.backends.cuda.memory.weights import LoadProgress, StageWeights
from convoy.model.backends.cuda.options import DTYPES, DeviceOptions, keep_kernels
from convoy.model.backends.cuda.sampling import DeviceSamples, feed, rehearse_sampling, start_sampling
from convoy.model.backends.cuda.working_memory import measure_working
from convoy.model.checkpoints.source import ModelSource
from convoy.model.device import check_device
from convoy.model.kv.pools import BlockTable, StagedStep
from convoy.model.sampling.output_rows import SampleJob, rows_with_state
from convoy.model.stage import LoadedStage, PendingSamples
from convoy.model.tensors import check_hidden, check_tokens, output_rows
from convoy.plan.spec.sharding import WHOLE, Shard, rank_spec, settle, share_of
from convoy.wire.messages.control import MAX_BATCH, Row, StageAssignment, Step

# Beyond any place of a sample.
_NO_PLACE = MAX_STEP_TOKENS


class CudaStage(CarriesKv):
    """Run the layers of one member on one device. Not thread-safe: one thread runs its steps, in order.

    Without ``captured``, decodes run like prefills from the next pools on, which is slower.
    """

    overlaps = True
    num_devices = 1

    def __init__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        model: Model,
        options: DeviceOptions,
        shard: Shard = WHOLE,
    ) -> None:
        spec = rank_spec(source.spec, shard.world_size, shard.experts)
        self.shard = shard
        self.assignment = assignment
        self.hidden_size = spec.hidden_size
        self.output_size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.token_id_layers = spec.token_id_layers
        self.weight_bytes = model.weight_bytes
        self.weight_share = share_of(self.weight_bytes, source.spec, assignment, options.kernel)
        self.bytes_read = model.bytes_read
        self.options = options
        self.device = options.device
        self.captured = options.captured and model.can_capture
        self._model: Model | None = model
        self._dtype = options.dtype
        self._source = (source.digest, source.path)
        self._spec = spec
        self._kv = DevicePools(
            spec,
            range(assignment.start, assignment.end),
            *(options.device, options.dtype),
            block_size=options.block_size,
            require_tags=options.require_tags,
        )
        self._num_units = torch.cuda.get_device_properties(self.device).multi_processor_count
        # Copies and outputs have streams of their own, beside the layers. One thread submits all steps. On
        # the layers' stream, an output would wait for the layers of every step that the thread started since.
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._staging = Staging(self.device)
        self._outputs = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs: DecodeGraphs | None = None
        # The rows of prepared steps, by number.
        self._described: dict[int, HostBatch | None] = {}
        self._working_bytes: int | None = None
        self._sums: DeviceSums | None = None

    @classmethod
    def load(
        cls,
        source: ModelSource,
        assignment: StageAssignment,
        *,
        device: str,
        kernel: str,
        block_size: int,
        require_tags: bool,
        captured: bool = True,
        progress: LoadProgress | None = None,
        before: LoadedStage | None = None,
        shard: Shard = WHOLE,
    ) -> CudaStage:
        """Load the assignment's weights. ``progress`` is called with (loaded, total) bytes.

        A ``shard`` loads one rank's slice, which runs after `join` has connected it to the others.

        Raises ModelError for a missing device, for a kernel that does not run there, and as the loading of
        `memory.weights` and `library_layers` does. Raises PlanError for weights that do not fit on the
        device.
        """
        keep_kernels()
        shard = settle(source.spec, shard)
        chosen = check_device(device)
        if kernel not in DTYPES:
            raise ModelError(f"kernel {kernel!r} does not run on {device}, expected {', '.join(DTYPES)}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ModelError(f"block size {block_size} is not a power of two, as {device} needs it")
        options = DeviceOptions(chosen, kernel, block_size, require_tags, captured)
        kept = before.give_up_weights(source, options, shard) if isinstance(before, CudaStage) else None
        model = load_model(source, assignment, options, progress, kept, shard)
        return cls(source, assignment, model, options, shard)

    def join(self, sums: DeviceSums) -> None:
        """Connect this rank's slice to the other ranks, before anything runs."""
        self._sums = sums
        self._owned.join(sums)

    def forget(self) -> None:
        """Free the K/V pools and the graphs over them. Steps are refused until new pools are made."""
        self._graphs = None
        self._described.clear()
        self._kv.forget()

    def give_up(self) -> None:
        """End this stage and free its memory."""
        self.forget()
        self._model = None

    def give_up_weights(
        self, source: ModelSource, options: DeviceOptions, shard: Shard = WHOLE
    ) -> StageWeights | None:
        """End this stage, and return its weights if a stage of ``source`` with these options can use them."""
        model = self._model
        self.give_up()
        same = (source.digest, source.path) == self._source
        same &= (options.device, options.form) == (self.device, self.options.form) and shard == self.shard
        return model.weights if same and isinstance(model, DeviceDecoder) else None

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        """Drop all sequences and make K/V pools, of ``num_blocks`` blocks for each group or for all alike.

        Raises StepError, PlanError.
        """
        kv = self._kv
        every = [num_blocks] * kv.num_groups if isinstance(num_blocks, int) else num_blocks
        self.forget()
        with torch.cuda.device(self.device):
            kv.make(every)
        if self.captured and kv.layers:
            shape = GraphShape(
                *(self.hidden_size, kv.max_blocks(every), kv.shapes, self._dtype),
                *(self.device, self._num_units, self._sums),
            )
            self._graphs = DecodeGraphs(shape, self._run_decode)

    def room_bytes(self, offered_bytes: int) -> int:
        """Return the bytes left for K/V beside weights, graphs and the memory that a step needs.

        The limit is the lesser of ``offered_bytes`` and the memory that is free now. A step's memory is
        measured at the first call, which drops the K/V. Raises PlanError.
        """
        try:
            with torch.cuda.device(self.device):
                if self._working_bytes is None:
                    self._working_bytes = measure_working(self)
                torch.cuda.empty_cache()
                free = torch.cuda.mem_get_info(self.device)[0]
        except torch.cuda.OutOfMemoryError as error:
            raise PlanError(
                f"a step does not fit on {self.device} beside {self.weight_bytes} bytes of weights",
                hint="give this member fewer layers, or serve with --quantize q8 or q4",
            ) from error
        return min(offered_bytes - self.weight_bytes, free) - self._working_bytes

    def capture(self, size: int) -> bool:
        """Capture a decode of ``size`` rows now. Return False where decodes are not captured."""
        return self._graphs is not None and self._graphs.find(size) is not None

    @torch.inference_mode()
    def rehearse(self, num_tokens: int) -> None:
        """Run layers and output once, over the contents of block 0 of every pool."""
        num_tokens = min(num_tokens, self._spec.max_context)
        ids = np.zeros(num_tokens, np.int32)
        x = torch.zeros(num_tokens, self.hidden_size, dtype=self._dtype, device=self.device)
        if self._kv.layers:
            blocks = -(-num_tokens // self.options.block_size)
            table = BlockTable([[0] * blocks for _ in self.block_bytes])
            rows = [(Row(0, 0, num_tokens, 0), table)]
            host = describe_rows(rows, self._kv.num_groups, self.options.block_size)
            batch, tokens = on_device(host, ids, self._kv.shapes, self.device, self._num_units)
            x = self._finished(self._owned.run(x, tokens, batch, self._kv.layers))
        if self._owned.owns_output:
            rehearse_sampling(self._owned.logits(x[:MAX_BATCH].contiguous()), self._staging)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a block of each cache group on this stage."""
        return self._kv.block_bytes

    @property
    def takes_tokens(self) -> bool:
        """Return whether this stage needs token ids, for the embedding or for layers that use them."""
        return self.assignment.embed or self._owned.takes_tokens

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Return this stage's layers by their number in the whole model.

        A captured decode does not call them.
        """
        return self._owned.layers

    @property
    def model(self) -> Model:
        """Return the model. Raises StepError for a stage that has ended."""
        return self._owned

    @property
    def block_size(self) -> int:
        return self.options.block_size

    @property
    def model_digest(self) -> str:
        return self._source[0]

    def apply(self, step: Step) -> None:
        """Apply releases, grants and the rows' new lengths, all or nothing, without a run.

        Raises StepError.
        """
        self._commit(self._kv.tables.stage(step))

    def _commit(self, staged: StagedStep) -> None:
        # Copies of states come after the steps that were started, and before this one.
        with torch.inference_mode(), torch.cuda.device(self.device):
            self._kv.commit(staged)

    def prepare(self, step: Step) -> None:
        """Check and apply the next step, and describe its rows for the kernels, before its inputs are here.

        Raises StepError.
        """
        staged = self._kv.tables.prepare(step)
        self._described[step.number] = self._describe(staged)

    def _describe(self, staged: StagedStep) -> HostBatch | None:
        if not (self._kv.layers and staged.rows):
            return None
        return describe_rows(staged.rows, self._kv.num_groups, self.options.block_size)

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Apply the step and run its rows. Returns [T, hidden_size] after this stage's layers.

        The owner of the embedding takes ``tokens`` (int64 [T]). Others take ``hidden`` ([T, hidden_size],
        float32 or bfloat16, on any device). The result is on the host, or on the device where this stage's
        output comes next. Raises StepError for invalid input, before anything is changed.
        """
        return self.start(step, hidden, tokens).wait()

    @torch.inference_mode()
    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        stays: bool = False,
        selects: bool = False,
    ) -> PendingResult:
        """Start a step like `run`, without waiting for the device.

        The next step may start before the result is here. With ``stays`` the result is left on the device.
        With ``selects`` it has only the rows that go on to an output.
        """
        return self.launch(self.check(step, hidden, tokens), stays=stays, selects=selects)

    @property
    def feeds(self) -> bool:
        """Return whether embedding and output run on this device alone, so that `start_fed` may be called."""
        return self.assignment.embed and self.assignment.output and self._sums is None

    @torch.inference_mode()
    def start_fed(
        self,
        step: Step,
        tokens: torch.Tensor,
        samples: Sequence[PendingSamples],
        *,
        selects: bool = False,
    ) -> PendingResult:
        """Start a step like `start`; negative tokens name ``samples`` of the device.

        It waits for them on the device alone. Raises StepError.
        """
        own = [one for one in samples if isinstance(one, DeviceSamples)]
        assert len(own) == len(samples), "a stage is fed with its own samples"
        checked = self.check(step, None, tokens.clamp(min=0))
        # The host sampled a job without a place. Its row is void, so any token will do.
        places = [_NO_PLACE] * sum(len(one.jobs) for one in own)
        first_job = first_place = 0
        for one in own:
            for place, job in enumerate(one.here, first_place):
                places[first_job + job] = place
            first_job, first_place = first_job + len(one.jobs), first_place + len(one.here)
        named = [token if token >= 0 else -1 - places[-1 - token] for token in tokens.tolist()]
        with torch.cuda.device(self.device):
            current = torch.cuda.current_stream(self.device)
            current.wait_stream(self._outputs)
            for one in own:
                one.drawn.record_stream(current)
            drawn = own[0].drawn if len(own) == 1 else torch.cat([one.drawn for one in own], dim=1)
        return self.launch(replace(checked, ids=torch.tensor(named), fed=drawn), selects=selects)

    def check(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> CheckedStep:
        """Apply the step, and return it for `launch`, here or on another rank. Raises StepError."""
        staged = self._kv.tables.stage(step)
        num_tokens = sum(row.num_tokens for row in step.rows)
        ids = tokens if self.takes_tokens else None
        if self.takes_tokens:
            check_tokens(tokens, num_tokens, self.vocab_size)
        embeds = self.assignment.embed
        hidden = None if embeds else check_hidden(hidden, num_tokens, self.hidden_size)
        # Commit only after all checks, so a refused step changes nothing.
        self._commit(staged)
        known = self._described.pop(step.number, None)
        host = known if staged.is_applied else self._describe(staged)
        return CheckedStep(step, host, hidden, ids)

    @torch.inference_mode()
    def launch(self, checked: CheckedStep, *, stays: bool = False, selects: bool = False) -> PendingResult:
        """Run a step that `check` returned. The arguments are those of `start`."""
        with torch.cuda.device(self.device):
            return self._leave(checked.step, self._compute(checked), stays=stays, selects=selects)

    @torch.inference_mode()
    def fill(self, checked: CheckedStep, like: DecodeGraph | None = None) -> DecodeGraph | None:
        """Return a captured graph filled with the step's inputs and ready for replay.

        ``like`` is another rank's graph, from which the inputs are copied. Returns None for a step that
        must go to `launch`: it is no decode, or no graph of its size was captured yet.
        """
        host = checked.host
        if self._graphs is None or host is None or not host.is_decode:
            return None
        graph = self._graphs.captured(len(host.lengths))
        if graph is None or not graph.fits(host):
            return None
        with torch.cuda.device(self.device):
            if like is None:
                graph.fill(host, checked.told, checked.hidden, self._staging)
            else:
                graph.fill_like(like, checked.hidden, self._staging)
        return graph

    @torch.inference_mode()
    def left(self, graph: DecodeGraph, checked: CheckedStep, *, selects: bool = False) -> PendingResult:
        """Return the result of a replayed graph from `fill`, as `launch` does."""
        with torch.cuda.device(self.device):
            found = graph.found(len(checked.step.rows)).clone()
            return self._leave(checked.step, found, stays=False, selects=selects)

    def _leave(self, step: Step, found: torch.Tensor, *, stays: bool, selects: bool) -> PendingResult:
        # All ranks have the same hidden state, so only rank 0 copies it to the host.
        kept = stays or self._goes_on or self.shard.rank > 0
        found = self.select(step, found) if selects else found
        return PendingResult.kept(found) if kept else PendingResult.copied(found, self._copies)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows that go on to the output: each row's last ``num_outputs`` positions.

        They are in row order.
        """
        wanted = output_rows(step, hidden.shape[0])
        if wanted is None:
            return hidden
        return hidden.index_select(0, self._staging.on_card(wanted) if hidden.is_cuda else wanted)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and `lm_head`: [M, hidden_size] to float32 logits [M, vocab_size] on the host.

        All ranks must call this, and rank 0 gets the logits of all of them.
        """
        with torch.inference_mode(), torch.cuda.device(self.device):
            return PendingResult.copied(self.device_output(hidden).float(), self._copies).wait()

    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm alone: [M, hidden_size] to float32 [M, hidden_size] on the host.

        Raises StepError for a stage that does not own the output.
        """
        if not self._owned.owns_output:
            raise StepError("this stage does not own the output")
        hidden = check_hidden(hidden, hidden.shape[0], self.hidden_size)
        with torch.inference_mode(), torch.cuda.device(self.device):
            return PendingResult.copied(self._final(hidden), self._copies).wait()

    def _final(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._owned.final_state(self._staging.on_card(hidden).to(self._dtype).contiguous()).float()

    @torch.inference_mode()
    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> DeviceSamples:
        """Start sampling from the output of ``hidden`` [len(jobs), hidden_size]. Raises StepError."""
        with self._beside(hidden):
            logits, wanted = self.device_output(hidden), rows_with_state(jobs)
            states = self._final(hidden[wanted]) if wanted else None
            return start_sampling(logits, jobs, self._copies, self._staging, states)

    @torch.inference_mode()
    def take_part(self, hidden: torch.Tensor) -> None:
        """Compute this rank's part of the logits, for the sampling on rank 0."""
        with self._beside(hidden):
            self.device_output(hidden)

    @contextmanager
    def _beside(self, hidden: torch.Tensor) -> Iterator[None]:
        """Run the outputs of ``hidden`` beside the layers of the next steps."""
        with torch.cuda.device(self.device):
            if hidden.is_cuda:
                self._outputs.wait_stream(torch.cuda.current_stream(hidden.device))
                # Without this torch could reuse the memory of ``hidden`` while the output still reads it.
                hidden.record_stream(self._outputs)
            with torch.cuda.stream(self._outputs):
                yield

    @torch.inference_mode()
    def device_output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits on the device, [M, vocab_size], bfloat16 or float32."""
        if not self._owned.owns_output:
            raise StepError("this stage does not own the output")
        hidden = check_hidden(hidden, hidden.shape[0], self.hidden_size)
        if not hidden.shape[0]:
            return torch.empty(0, self.vocab_size, device=self.device)
        with torch.cuda.device(self.device):
            logits = self._owned.logits(self._staging.on_card(hidden).to(self._dtype).contiguous())
            parts = None if self._sums is None else self._sums.gather(logits)
            # The vocabulary is padded to equal parts, so the joined logits are cut to its size.
            return logits if parts is None else torch.cat(parts, dim=-1)[:, : self.vocab_size]

    @property
    def _goes_on(self) -> bool:
        """Return whether a hidden state behind the last layer here goes to this stage's own output."""
        return self.assignment.output and self.assignment.end == self._spec.num_layers

    def _compute(self, checked: CheckedStep) -> torch.Tensor:
        """Return [T, hidden_size] on the device, in memory that belongs to the caller."""
        host, hidden, ids = checked.host, checked.hidden, checked.ids
        if host is None:
            return self._finished(self._enter(hidden, None if ids is None else self._staging.on_card(ids)))
        tokens, fed = checked.told, checked.fed
        replaces = None if fed is None else partial(feed, samples=fed, width=self.vocab_size)
        graph = self._graphs.find(len(host.lengths)) if self._graphs and host.is_decode else None
        if graph is not None and graph.fits(host):
            # The graph's next run overwrites its result, so the caller gets a copy.
            return graph.run(host, tokens, hidden, self._staging, replaces).clone()
        told = np.empty(0, np.int32) if tokens is None else tokens
        batch, copied = on_device(host, told, self._kv.shapes, self.device, self._num_units)
        here = None if ids is None else copied
        if replaces is not None:
            replaces(copied)
        return self._finished(self._owned.run(self._enter(hidden, here), here, batch, self._kv.layers))

    def _run_decode(self, ids: torch.Tensor, hidden: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        x = self._owned.embed(ids) if self.assignment.embed else hidden
        return self._finished(self._owned.run(x, ids, batch, self._kv.layers))

    def _finished(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x``, and end the numbering of this run's sums between ranks."""
        if self._sums is not None:
            self._sums.finish()
        return x

    def _enter(self, hidden: torch.Tensor | None, ids: torch.Tensor | None) -> torch.Tensor:
        """Return the first layer's input, in memory that the layers may overwrite."""
        if hidden is None:
            assert ids is not None
            return self._owned.embed(ids)
        return self._staging.on_card(hidden).to(self._dtype, copy=hidden.is_cuda)

    @property
    def _owned(self) -> Model:
        if self._model is None:
            raise StepError("this stage is over, and another has its weights")
        return self._model
