"""A stage on a CUDA device: bfloat16 weights and K/V pools there, decode captured, prefill as it comes.

It has the face of `model.stage.Stage`, which hands over to it. Hidden states leave it as it computes them, in
bfloat16 on the host; between the last layer and the output of one stage they stay on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from convoy.errors import HiddenError, ModelError, PlanError, StepError
from convoy.model.device import CUDA_KERNEL, check_device
from convoy.model.draw import Draw
from convoy.model.gpu.batch import DeviceBatch, describe_rows, on_device
from convoy.model.gpu.decoder import Decoder
from convoy.model.gpu.drawing import PendingDraws, best_tokens, start_draws
from convoy.model.gpu.face import Model
from convoy.model.gpu.graphs import DecodeGraphs, GraphShape
from convoy.model.gpu.pending import Pending
from convoy.model.gpu.pools import DevicePools
from convoy.model.gpu.rope import make_rotation
from convoy.model.gpu.staging import Staging
from convoy.model.gpu.weights import LoadProgress, StageWeights, load_weights, why_not_ours
from convoy.model.gpu.working import measure_working
from convoy.model.kv import BlockTable, StagedStep
from convoy.model.library import LIBRARY
from convoy.model.source import ModelSource
from convoy.model.tensors import HIDDEN_DTYPES
from convoy.wire.messages import MAX_BATCH, Row, StageAssignment, Step

KERNEL = CUDA_KERNEL
# to look for mistakes: no rounding to bfloat16, and the library's layers for every family
CHECK_KERNEL = "plain-f32"
_DTYPES = {KERNEL: torch.bfloat16, CHECK_KERNEL: torch.float32}


@dataclass(frozen=True)
class DeviceOptions:
    """What `model.stage.StageOptions` says, of a device."""

    device: torch.device
    kernel: str
    block_size: int  # tokens
    require_tags: bool
    captured: bool = True
    num_threads: None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return _DTYPES[self.kernel]


class CudaStage:
    """The layers of one member on one device. Not thread-safe: one thread runs its steps, in order.

    Without ``captured``, from the next pools on, decodes run as prefills do, which is slower.
    """

    overlaps = True
    num_devices = 1

    def __init__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        model: Model,
        options: DeviceOptions,
    ) -> None:
        spec = source.spec
        self.assignment = assignment
        self.hidden_size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.token_id_layers = spec.token_id_layers
        self.weight_bytes = model.weight_bytes
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
        # copies and outputs run beside the layers: a lone thread submits steps, and would wait with an output
        # for the layers of all steps that it began since
        self._copies = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        self._staging = Staging(self.device)
        self._outputs = torch.cuda.Stream(self.device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs: DecodeGraphs | None = None
        self._working_bytes: int | None = None

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
        before: object = None,
    ) -> CudaStage:
        """Load the assignment's weights; ``progress`` is called with (loaded, total) bytes.

        Raises ModelError for a device that is not there, a kernel that does not run there, and as the loading
        of `gpu.weights` and `gpu.library_layers` does; PlanError for weights that the device has no room for.
        """
        chosen = check_device(device)
        if kernel not in _DTYPES:
            raise ModelError(f"kernel {kernel!r} does not run on {device}, expected {' or '.join(_DTYPES)}")
        if block_size < 1 or block_size & (block_size - 1):
            raise ModelError(f"block size {block_size} is not a power of two, as {device} needs it")
        kept = before.give_up_weights(source, chosen) if isinstance(before, CudaStage) else None
        options = DeviceOptions(chosen, kernel, block_size, require_tags, captured)
        try:
            with torch.cuda.device(chosen), torch.inference_mode():
                model: Model
                if kernel == KERNEL and why_not_ours(source) is None:
                    weights = load_weights(source, assignment, chosen, progress, kept)
                    head_dim = source.spec.cache_groups[0].head_dim
                    model = Decoder(weights, make_rotation(source, head_dim, chosen))
                else:
                    with LIBRARY:
                        # transformers, which takes seconds, and not before
                        from convoy.model.gpu.library_layers import load_library_decoder

                    model = load_library_decoder(source, assignment, chosen, options.dtype, progress)
        except torch.cuda.OutOfMemoryError as error:
            raise PlanError(
                f"{source.name}: layers {assignment.start} to {assignment.end - 1} do not fit on {device}",
                hint="give this member fewer layers",
            ) from error
        return cls(source, assignment, model, options)

    def forget(self) -> None:
        """Free the K/V pools and the graphs over them; steps are refused until there are new ones."""
        self._graphs = None
        self._kv.forget()

    def give_up(self, source: ModelSource, options: object) -> None:  # noqa: ARG002 - as `Stage` has it
        """This stage is over, and one on the host has no use for its weights."""
        self.give_up_weights(source, self.device)

    def give_up_weights(self, source: ModelSource, device: torch.device) -> StageWeights | None:
        """This stage is over: its weights, where one of ``source`` on ``device`` can use them."""
        self.forget()
        model, self._model = self._model, None
        same = ((source.digest, source.path), device) == (self._source, self.device)
        return model.weights if same and isinstance(model, Decoder) else None

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        """Forget all sequences and make K/V pools, for each cache group of so many blocks, or all alike.

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
                *(self.device, self._num_units),
            )
            self._graphs = DecodeGraphs(shape, self._run_decode)

    def room_bytes(self, offered_bytes: int) -> int:
        """What is left for K/V of ``offered_bytes``, or of what is free now, beside weights, graphs and what
        a step needs: that is measured the first time, and K/V is forgotten then. Raises PlanError.
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
                hint="give this member fewer layers",
            ) from error
        return min(offered_bytes - self.weight_bytes, free) - self._working_bytes

    def capture(self, size: int) -> bool:
        """Capture a decode of so many rows now; False where decodes are not captured."""
        return self._graphs is not None and self._graphs.find(size) is not None

    @torch.inference_mode()
    def rehearse(self, num_tokens: int) -> None:
        """Run layers and output once, over what is in block 0 of every pool."""
        num_tokens = min(num_tokens, self._spec.max_context)
        ids = np.zeros(num_tokens, np.int32)
        x = torch.zeros(num_tokens, self.hidden_size, dtype=self._dtype, device=self.device)
        if self._kv.layers:
            blocks = -(-num_tokens // self.options.block_size)
            table = BlockTable([[0] * blocks for _ in self.block_bytes])
            rows = [(Row(0, 0, num_tokens, 0), table)]
            host = describe_rows(rows, self._kv.num_groups, self.options.block_size)
            batch, tokens = on_device(host, ids, self._kv.shapes, self.device, self._num_units)
            x = self._owned.run(x, tokens, batch, self._kv.layers)
        if self._owned.owns_output:
            best_tokens(self._owned.logits(x[:MAX_BATCH].contiguous()))

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """What a block of each cache group takes here."""
        return self._kv.block_bytes

    @property
    def takes_tokens(self) -> bool:
        """Whether a step's token ids must come here: for the embedding, or for layers that need them."""
        return self.assignment.embed or self._owned.takes_tokens

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """The layers here, by their number in the whole model. A captured decode does not call them."""
        return self._owned.layers

    @property
    def model(self) -> Model:
        """Raises StepError for a stage that is over."""
        return self._owned

    @property
    def model_digest(self) -> str:
        return self._source[0]

    def apply(self, step: Step) -> None:
        """Releases, grants and the rows' new lengths, all or nothing, without a run. Raises StepError."""
        tables = self._kv.tables
        tables.commit(tables.stage(step))

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Apply the step and run its rows: [T, hidden_size] after this stage's layers.

        The owner of the embedding takes ``tokens`` (int64 [T]), others ``hidden`` ([T, hidden_size], float32
        or bfloat16, anywhere). The result is on the host, or, where the output comes next here, on the
        device. Raises StepError for what makes no sense, before anything is changed.
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
    ) -> Pending:
        """As `run`, but without a wait for the device: the next step may start before the result is here.

        What ``stays`` is left on the device; with ``selects`` only rows that go on to an output come.
        """
        tables = self._kv.tables
        staged = tables.stage(step)
        num_tokens = sum(row.num_tokens for row in step.rows)
        ids = self._check_tokens(tokens, num_tokens) if self.takes_tokens else None
        hidden = None if self.assignment.embed else self._check_hidden(hidden, num_tokens)
        tables.commit(staged)
        with torch.cuda.device(self.device):
            found = self._compute(staged, hidden, ids)
            kept = stays or self._goes_on
            found = self.select(step, found) if selects else found
            return Pending.kept(found) if kept else Pending.copied(found, self._copies)

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """The rows that go on to the output: each row's ``num_outputs`` trailing positions, in row order."""
        wanted, end = list[int](), 0
        for row in step.rows:
            end += row.num_tokens
            wanted.extend(range(end - row.num_outputs, end))
        if hidden.shape[0] != end:
            raise StepError(f"a step of {end} tokens has a hidden state of {hidden.shape[0]} rows")
        if len(wanted) == end:
            return hidden
        index = torch.tensor(wanted, dtype=torch.int64)
        return hidden.index_select(0, self._staging.on_card(index) if hidden.is_cuda else index)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and `lm_head`: [M, hidden_size] to float32 logits [M, vocab_size] on the host."""
        with torch.inference_mode(), torch.cuda.device(self.device):
            return Pending.copied(self.device_output(hidden).float(), self._copies).wait()

    @torch.inference_mode()
    def draw(self, hidden: torch.Tensor, draws: Sequence[Draw]) -> PendingDraws:
        """Begin to draw from the output of ``hidden`` [len(draws), hidden_size]. Raises StepError."""
        with torch.cuda.device(self.device):
            outputs = self._outputs
            if hidden.is_cuda:
                outputs.wait_stream(torch.cuda.current_stream(hidden.device))
                hidden.record_stream(outputs)
            with torch.cuda.stream(outputs):
                return start_draws(self.device_output(hidden), draws, self._copies, self._staging)

    @torch.inference_mode()
    def device_output(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits on the device, [M, vocab_size], bfloat16 or float32."""
        if not self._owned.owns_output:
            raise StepError("this stage does not own the output")
        hidden = self._check_hidden(hidden, hidden.shape[0])
        if not hidden.shape[0]:
            return torch.empty(0, self.vocab_size, device=self.device)
        with torch.cuda.device(self.device):
            return self._owned.logits(self._staging.on_card(hidden).to(self._dtype).contiguous())

    @torch.inference_mode()
    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """The K/V of ``blocks`` in layers [start, end): float32 [layers, 2, positions, kv_heads, head_dim].

        Raises StepError for what this stage does not have, and for more than `span_kv.MAX_CARRIED_BYTES`.
        """
        return self._kv.read_blocks(start, end, blocks)

    @torch.inference_mode()
    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks``, which no sequence has, in layers from ``start`` on; ``kv`` as `read_blocks` gives.

        They hold the prefixes of ``tags`` once the last layer here is among them, and no prefix before: so
        layers come in order. Raises StepError; nothing is changed then.
        """
        self._kv.write_blocks(start, blocks, tags, kv)

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Of what `read_blocks` gives. Raises StepError for more than `span_kv.MAX_CARRIED_BYTES`."""
        return self._kv.carried_shape(num_layers, num_blocks)

    @property
    def _goes_on(self) -> bool:
        """Whether a hidden state that leaves the layers goes to the output here."""
        return self.assignment.output and self.assignment.end == self._spec.num_layers

    def _compute(
        self, staged: StagedStep, hidden: torch.Tensor | None, ids: torch.Tensor | None
    ) -> torch.Tensor:
        """[T, hidden_size] on the device, which is the caller's."""
        if not self._kv.layers or not staged.rows:
            return self._enter(hidden, None if ids is None else self._staging.on_card(ids))
        host = describe_rows(staged.rows, self._kv.num_groups, self.options.block_size)
        tokens = np.empty(0, np.int32) if ids is None else ids.numpy().astype(np.int32)
        graph = self._graphs.find(len(host.lengths)) if self._graphs and host.is_decode else None
        if graph is not None and graph.fits(host):
            told = None if ids is None else tokens
            return graph.run(host, told, hidden, self._staging).clone()
        batch, copied = on_device(host, tokens, self._kv.shapes, self.device, self._num_units)
        here = None if ids is None else copied
        return self._owned.run(self._enter(hidden, here), here, batch, self._kv.layers)

    def _run_decode(self, ids: torch.Tensor, hidden: torch.Tensor, batch: DeviceBatch) -> torch.Tensor:
        x = self._owned.embed(ids) if self.assignment.embed else hidden
        return self._owned.run(x, ids, batch, self._kv.layers)

    def _enter(self, hidden: torch.Tensor | None, ids: torch.Tensor | None) -> torch.Tensor:
        """What goes into the first layer, in memory of its own."""
        if hidden is None:
            assert ids is not None
            return self._owned.embed(ids)
        return self._staging.on_card(hidden).to(self._dtype, copy=hidden.is_cuda)

    @property
    def _owned(self) -> Model:
        if self._model is None:
            raise StepError("this stage is over, and another has its weights")
        return self._model

    def _check_tokens(self, tokens: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        if tokens is None or tokens.shape != (num_tokens,):
            found = "no tokens" if tokens is None else f"tokens of shape {list(tokens.shape)}"
            raise StepError(f"a step of {num_tokens} tokens came with {found}")
        ids = tokens.numpy()
        if num_tokens and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            raise StepError(f"a step has a token outside the vocabulary of {self.vocab_size}")
        return tokens

    def _check_hidden(self, hidden: torch.Tensor | None, num_tokens: int) -> torch.Tensor:
        wanted = (num_tokens, self.hidden_size)
        if hidden is None or hidden.shape != wanted or hidden.dtype not in HIDDEN_DTYPES:
            found = "nothing" if hidden is None else f"{hidden.dtype} of shape {list(hidden.shape)}"
            raise HiddenError(f"expected a float32 or bfloat16 hidden state of {list(wanted)}, got {found}")
        return hidden
