"""Reading what a stage owns of a model, a portion at a time: each tensor once, and no other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from convoy.model.checkpoint import StoredTensor
from convoy.model.formats.read import read_tensor
from convoy.model.owned import LAYER_INPUT_NAMES, decoder_name, owned_tensors
from convoy.model.source import ModelSource

LoadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class Part:
    """What is to be read: all that a stage owns, what it lacks of that, or a portion of either."""

    layers: frozenset[int]
    embed: bool
    output: bool


class Reading:
    """Reads what a stage owns, a portion at a time, and says how far it is."""

    def __init__(self, source: ModelSource, part: Part, progress: LoadProgress | None) -> None:
        self.num_bytes = 0  # read so far that the stage needs
        self._source = source
        self._progress = progress
        self._num_layers = len(part.layers)
        self._total = sum(map(self._share, self._owned(part)))

    def read(self, part: Part) -> dict[str, torch.Tensor]:
        """The portion's tensors by their names in the decoder, unpacked."""
        state: dict[str, torch.Tensor] = {}
        for stored in self._owned(part):
            name = self._source.layout.whole(stored.name)
            if decoder_name(name) not in state:
                state[decoder_name(name)] = read_tensor(self._source, name)
            self.num_bytes += self._share(stored)
            if self._progress is not None:
                self._progress(self.num_bytes, self._total)
        return state

    def _owned(self, part: Part) -> list[StoredTensor]:
        return owned_tensors(self._source, part.layers, embed=part.embed, output=part.output)

    def _share(self, stored: StoredTensor) -> int:
        """Of what all layers share, each has its part."""
        if decoder_name(stored.name).startswith(LAYER_INPUT_NAMES[:2]):
            return stored.num_bytes * self._num_layers // self._source.spec.num_layers
        return stored.num_bytes
