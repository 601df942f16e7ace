"""Read the tensors that a stage owns, a portion at a time, each tensor once and no others."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.owned import LAYER_INPUT_NAMES, owned_tensors
from convoy.model.checkpoints.read_tensor import read_kept, read_tensor
from convoy.model.checkpoints.slices import Slices
from convoy.model.checkpoints.source import ModelSource
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.weights import Stored, StoredStack, dense_of
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.sharding import WHOLE, Shard

LoadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class TensorPart:
    """Name the tensors to read: all that a stage owns, those it still lacks, or a portion of either."""

    layers: frozenset[int]
    embed: bool
    output: bool


class Reading:
    """Read the tensors of a stage, a portion at a time, and report the progress.

    If it ``keeps`` the forms of the file, matrices are not unpacked. ``rounds`` returns a tensor of the model
    with rounded matrices, and None for one that stays as it is.
    """

    def __init__(
        self,
        source: ModelSource,
        part: TensorPart,
        progress: LoadProgress | None,
        shard: Shard = WHOLE,
        *,
        keeps: bool = False,
        rounds: Callable[[str], StoredMatrix | StoredStack | None] = lambda _name: None,
    ) -> None:
        # bytes read so far, counting only the stage's own shares
        self.num_bytes = 0
        self.shard = shard
        self._slices = None if shard == WHOLE else Slices(source.spec, shard)
        self._source = source
        self._keeps, self._rounds = keeps, rounds
        self._kept = source.layout.kept(source.tensors) if keeps else {}
        self._progress = progress
        self._num_layers = len(part.layers)
        self._total = sum(map(self._share, self._owned(part)))

    def read(self, part: TensorPart) -> dict[str, Stored]:
        """Return the portion's tensors by their names in the decoder: unpacked, or in the form of the file.

        Both may lie in mapped memory.
        """
        state: dict[str, Stored] = {}
        for stored in self._owned(part):
            name = self._source.layout.whole(stored.name)
            own = self._own_name(name)
            if own is not None and own not in state:
                state[own] = self._slice(stored, name)
            self.num_bytes += self._share(stored)
            if self._progress is not None:
                self._progress(self.num_bytes, self._total)
        return state

    def _own_name(self, name: str) -> str | None:
        known = decoder_name(name)
        return known if self._slices is None else self._slices.name(known)

    def _slice(self, stored: StoredTensor, name: str) -> Stored:
        """Return this rank's slice of a tensor. Of a mapped file only the slice's pages are touched."""
        known = decoder_name(name)
        found: Stored | None = self._rounds(name)
        unpacks = found is not None and not self._keeps
        if found is None:
            found = (read_kept if known in self._kept else read_tensor)(self._source, name)
        if self._slices is not None:
            with named(stored):
                found = self._slices.take(known, found)
        turned = FAMILIES[self._source.spec.family].transposed_experts
        return dense_of(found, turned=turned) if unpacks else found

    def _owned(self, part: TensorPart) -> list[StoredTensor]:
        return owned_tensors(self._source, part.layers, embed=part.embed, output=part.output)

    def _share(self, stored: StoredTensor) -> int:
        """Return how many of a stored tensor's bytes count for this stage.

        Of a module that all layers share, each layer counts its part. Of a plain tensor, a rank counts its
        slice.
        """
        whole = self._source.layout.whole(stored.name)
        if self._slices is not None:
            if self._own_name(whole) is None:
                return 0
            if whole == stored.name and stored.num_bytes:
                with named(stored):
                    empty = torch.empty(stored.shape, device="meta")
                    own = self._slices.take(decoder_name(whole), empty)
                return self._of_layers(stored) * math.prod(own.shape) // empty.numel()
        return self._of_layers(stored)

    def _of_layers(self, stored: StoredTensor) -> int:
        if decoder_name(stored.name).startswith(LAYER_INPUT_NAMES[:2]):
            return stored.num_bytes * self._num_layers // self._source.spec.num_layers
        return stored.num_bytes


@contextlib.contextmanager
def named(stored: StoredTensor) -> Iterator[None]:
    """Prefix a ModelError about a tensor's slice with the path of the tensor's file."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{stored.path}: {error.message}", hint=error.hint) from error
