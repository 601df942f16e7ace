"""The interfaces of a stage: consecutive layers of a model, with embedding and output where owned.

`Stage` is the part that runs steps. Every backend implements it, and so do ranks that act as one stage.
`LoadedStage` adds the weights, and `RankSlice` is one rank's slice of a stage.
`convoy.model.backends.registry` loads them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from convoy.config.kernels import EXACT
from convoy.config.table import ENGINE
from convoy.model.collective import Collective
from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.plan.spec.sharding import Shard
from convoy.wire.messages.control import StageAssignment, Step

# The collective that a backend's slices join.
CollectiveT_contra = TypeVar("CollectiveT_contra", bound=Collective, contravariant=True)


@dataclass(frozen=True)
class StageOptions:
    """Hold the options of a stage.

    ``num_threads`` is set for the whole process at load; None leaves torch's number. ``device`` is cpu, or
    CUDA devices separated by commas. Decodes on those are captured as graphs unless ``captured`` is off,
    which is slower. ``kv_dtype`` is a word of `config.kernels.KV_FORMS`, or "auto" for the kernel's own.
    Without ``require_tags`` the stage takes rows that name no prefix, for callers that
    run one stage by itself.
    """

    kernel: str = EXACT
    block_size: int = ENGINE.block_size  # tokens
    device: str = "cpu"
    captured: bool = True
    num_threads: int | None = None
    require_tags: bool = True
    # float32 bytes of the layers that are built at a time; None leaves the loader's own number
    portion_bytes: int | None = None
    kv_dtype: str = ENGINE.kv_dtype


class PendingHidden(Protocol):
    """Describe hidden states, [rows, hidden_size], that may still be computed."""

    def wait(self) -> torch.Tensor:
        """Return the hidden states once they are complete."""


class PendingSamples(Protocol):
    """Describe sampling that is done, or that a device still works on."""

    def outcomes(self) -> tuple[SampleResult, ...]:
        """Return one result for each sampling job, in their order, once they are known."""


@dataclass(frozen=True)
class Computed:
    """Hold hidden states that are complete, as `PendingHidden`."""

    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        """Return the hidden states."""
        return self.tensor


class Stage(Protocol):
    """Run the layers of one member. Not thread-safe: one thread runs its steps, in order."""

    @property
    def assignment(self) -> StageAssignment:
        """Return the layers of this stage, and whether it owns the embedding and the output."""

    @property
    def hidden_size(self) -> int:
        """Return the width of a token's state at a stage boundary, over all its streams."""

    @property
    def output_size(self) -> int:
        """Return the width of a token's state behind the final norm."""

    @property
    def vocab_size(self) -> int:
        """Return the number of tokens of the vocabulary."""

    @property
    def token_id_layers(self) -> frozenset[int]:
        """Return the layers of the whole model that need token ids."""

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the weights that this stage holds."""

    @property
    def bytes_read(self) -> int:
        """Return the bytes of weights that loading this stage read, without those that it took over."""

    @property
    def overlaps(self) -> bool:
        """Return whether `start` returns before the result is complete, as on a device."""

    @property
    def num_devices(self) -> int:
        """Return on how many devices in a row this stage runs, so how many steps it may have at once."""

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Return the bytes of a block of each cache group on this stage."""

    @property
    def model_digest(self) -> str:
        """Return the digest of the model's manifest."""

    @property
    def takes_tokens(self) -> bool:
        """Return whether this stage needs token ids, for the embedding or for layers that use them."""

    def make_pools(self, num_blocks: int | Sequence[int]) -> None:
        """Drop all sequences and make K/V pools, of ``num_blocks`` blocks for each group or for all alike.

        Raises StepError, PlanError.
        """

    def room_bytes(self, offered_bytes: int) -> int:
        """Return the bytes that weights leave for K/V of ``offered_bytes`` of memory. Raises PlanError."""

    def forget(self) -> None:
        """Free the K/V pools. Steps are refused until new pools are made."""

    def prepare(self, step: Step) -> None:
        """Do what the next step needs beside its inputs, and apply it, before they are here.

        A later `run` or `start` of the same step finds it done. A stage may do nothing. Raises StepError.
        """

    def run(self, step: Step, hidden: torch.Tensor | None, tokens: torch.Tensor | None) -> torch.Tensor:
        """Apply the step and run its rows. Returns [T, hidden_size] after this stage's layers.

        The owner of the embedding takes ``tokens`` (int64 [T]). Others take ``hidden`` ([T, hidden_size],
        float32 or bfloat16), and ``tokens`` too where layers need them. Raises StepError for invalid
        input, before anything is changed unless the step was prepared, and `CollectiveError` where a rank of
        the stage fails.
        """

    def start(
        self,
        step: Step,
        hidden: torch.Tensor | None,
        tokens: torch.Tensor | None,
        *,
        selects: bool = False,
    ) -> PendingHidden:
        """Start a step like `run`, without waiting for a device.

        With ``selects`` the result has only the rows that go on to an output.
        """

    def select(self, step: Step, hidden: torch.Tensor) -> torch.Tensor:
        """Return the rows that go on to the output: each row's last ``num_outputs`` positions.

        They are in row order.
        """

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm and `lm_head`: [M, hidden_size] to float32 logits [M, vocab_size].

        Raises StepError for a stage that does not own the output.
        """

    def final_state(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply the final norm alone: [M, hidden_size] to float32 [M, output_size] on the host.

        Raises StepError for a stage that does not own the output.
        """

    def sample(self, hidden: torch.Tensor, jobs: Sequence[SampleJob]) -> PendingSamples:
        """Sample from the output of ``hidden`` [len(jobs), hidden_size].

        Raises StepError where the numbers differ.
        """

    def read_blocks(self, start: int, end: int, blocks: Sequence[int]) -> torch.Tensor:
        """Return the K/V of ``blocks`` in layers [start, end).

        The result is float32 [layers, 2, positions, kv_heads, head_dim]. Raises StepError for layers or
        blocks that this stage does not have, above `span_kv.MAX_CARRIED_BYTES`, and where not all layers
        keep all of their K/V in the same form.
        """

    def write_blocks(
        self, start: int, blocks: Sequence[int], tags: Sequence[bytes], kv: torch.Tensor
    ) -> None:
        """Fill ``blocks``, which no sequence holds, in layers from ``start`` on.

        ``kv`` is as from `read_blocks`. The blocks hold the prefixes of ``tags`` once the stage's last
        layer is filled, and no prefix before. Layers must therefore come in order. Raises StepError;
        nothing is changed then.
        """

    def kv_shape(self, num_layers: int, num_blocks: int) -> tuple[int, ...]:
        """Return the shape of a `read_blocks` result. Raises StepError above `span_kv.MAX_CARRIED_BYTES`."""


@runtime_checkable
class FeedingStage(Stage, Protocol):
    """Describe a stage that can run on its own samples before the host has them."""

    @property
    def feeds(self) -> bool:
        """Return whether it owns embedding and output, so that `start_fed` may be called."""

    def start_fed(
        self,
        step: Step,
        tokens: torch.Tensor,
        samples: Sequence[PendingSamples],
        *,
        selects: bool = False,
    ) -> PendingHidden:
        """Start a step like `start`.

        ``samples`` are results of `sample`. A negative token, -1 - i, is what their job i gets, counted over
        all of them. Raises StepError.
        """


class LoadedStage(Stage, Protocol):
    """Describe a stage whose weights are in this process, on one device or several."""

    @property
    def block_size(self) -> int:
        """Return the number of tokens of a K/V block."""

    @property
    def layers(self) -> Mapping[int, nn.Module]:
        """Return this stage's layers by their number in the whole model."""

    def apply(self, step: Step) -> None:
        """Apply releases, grants and the rows' new lengths, all or nothing, without a run.

        Raises StepError.
        """

    def give_up(self) -> None:
        """End this stage and free its memory."""


class RankSlice(LoadedStage, Protocol[CollectiveT_contra]):
    """Describe one rank's slice of every layer of a stage.

    It runs after `join` has connected it to the other ranks. All ranks call `output`: rank 0 gets all
    logits.
    """

    @property
    def shard(self) -> Shard:
        """Return the rank and the number of ranks."""

    @property
    def weight_share(self) -> float:
        """Return this slice's share of the weights of the whole stage."""

    def join(self, collective: CollectiveT_contra) -> None:
        """Connect this slice to the other ranks, before `run`.

        Raises ModelError for another rank's collective.
        """
