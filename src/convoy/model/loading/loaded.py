"""What a stage has of a model, once it is loaded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from convoy.model.kernels.linear import PackedLinear
from convoy.model.layers.exact import ExactAttention, ExactMlp, ExactNorm
from convoy.model.layers.int4 import rounded_to_4
from convoy.model.layers.layer_inputs import LayerInputs
from convoy.model.layers.quantized import Int8Linear, Int8Mlp, replace_linears, rounded_to_8
from convoy.model.layers.rope import RopeUse
from convoy.model.parallel.ranks import PartialSum, Ranks
from convoy.wire.messages.control import StageAssignment


@dataclass
class LoadedModules:
    """A stage's modules; what it does not own is None."""

    embedding: nn.Embedding | None
    layers: dict[int, nn.Module]  # by their number in the whole model
    norm: nn.Module | None
    output: nn.Module | None  # lm_head
    rotary: nn.Module
    ropes: dict[int, RopeUse]  # by layer
    embed_scale: float | None  # of what is looked up
    logit_scale: float | None
    logit_cap: float | None  # tanh bends the logits to within it
    layer_inputs: LayerInputs | None  # of layers that take token ids
    bytes_read: int
    ranks: Ranks | None = None  # that share these modules, of which there are slices then

    @property
    def is_ours(self) -> bool:
        """Whether all attention is `ExactAttention`, which the checks of linears and heads cover."""
        return all(rope.spread is not None for rope in self.ropes.values())

    @property
    def takes_lone_rows(self) -> bool:
        """Whether a lone row has its bits in every part of the layers, without company."""
        layers = list(self.layers.values())
        inner = [part for layer in layers for part in layer.modules() if part is not layer]
        return self.is_ours and all(_takes_lone_rows(part) for part in (*inner, *self._ends))

    @property
    def _ends(self) -> list[nn.Module]:
        """Of the output."""
        return [part for part in (self.norm, self.output) if part is not None]

    def parts(self) -> list[nn.Module]:
        """Everything with weights."""
        ends = (self.embedding, self.norm, self.output, self.layer_inputs)
        return [*self.layers.values(), *(part for part in ends if part is not None)]

    def settle(self, *, packed: bool) -> None:
        """Pack `lm_head` where it is wanted and still as it was stored, and own all memory.

        What points into the mapped file is copied: a file that changes must not change a running model.
        """
        if packed and isinstance(self.output, nn.Linear):
            self.output = PackedLinear(self.output.weight, self.output.bias)
        self._own_memory()

    def _own_memory(self) -> None:
        copies: dict[int, torch.Tensor] = {}  # by address, so that a tied matrix stays one
        for part in self.parts():
            part.requires_grad_(False)
            for tensor in (*part.parameters(), *part.buffers()):
                if _is_own(tensor):
                    continue
                address = tensor.data_ptr()
                if address not in copies:
                    copies[address] = tensor.data.clone()
                    # a module may stand in two parts
                    copies[copies[address].data_ptr()] = copies[address]
                tensor.data = copies[address]

    def free(self) -> LoadedModules:
        """The same without anything that has weights."""
        return replace(self, layers={}, ropes={}, embedding=None, norm=None, output=None, layer_inputs=None)

    def narrow(self, assignment: StageAssignment) -> None:
        """Free what ``assignment`` does not own.

        Embedding and output stay only together and unchanged: what one of them is depends on the other where
        they are tied.
        """
        for layer in [i for i in self.layers if not assignment.start <= i < assignment.end]:
            del self.layers[layer], self.ropes[layer]
        held = self.embedding is not None, self.output is not None
        if held != (assignment.embed, assignment.output):
            self.embedding = self.norm = self.output = None

    def quantize(self, bits: int = 8) -> None:
        """Round all packed linears to 8 bits, or to 4 but for `lm_head`; what was rounded before stays."""
        rounded = rounded_to_4 if bits == 4 else rounded_to_8
        for layer in self.layers.values():
            replace_linears(layer, rounded)
        if self.layer_inputs is not None:
            replace_linears(self.layer_inputs, rounded)
        if isinstance(self.output, nn.Linear):  # not packed yet
            self.output = Int8Linear(self.output.weight, self.output.bias)
        elif self.output is not None:
            self.output = replace_linears(self.output, rounded_to_8)

    @property
    def linears(self) -> list[PackedLinear]:
        """All of them, in the order of the layers, `lm_head` last; without exact mode's layers none."""
        parts = [*self.layers.values(), *(part for part in (self.output,) if part is not None)]
        return [m for part in parts for m in part.modules() if isinstance(m, PackedLinear)]

    @property
    def step_bytes(self) -> int:
        """Of `weight_bytes` those that a step reads which meets every expert: all but what is looked up."""
        if self.embedding is None:
            return self.weight_bytes
        lookup: torch.Tensor = self.embedding.weight
        output = getattr(self.output, "weight", None)
        # a tied matrix that is stored once is read as `lm_head`
        tied = isinstance(output, torch.Tensor) and output.data_ptr() == lookup.data_ptr()
        return self.weight_bytes - (0 if tied else lookup.nbytes)

    @property
    def weight_bytes(self) -> int:
        """Resident bytes; a tied matrix that is stored once counts once."""
        # parameters, and the buffers that a checkpoint has
        plain: dict[int, int] = {
            t.data_ptr(): t.nbytes for part in self.parts() for t in part.state_dict().values()
        }
        packed = [
            m.weight_bytes for part in self.parts() for m in part.modules() if isinstance(m, PackedLinear)
        ]
        return sum(plain.values()) + sum(packed)


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether the memory is torch's, and has nothing else in it: a copy would stand beside it for a while."""
    storage = tensor.untyped_storage()
    return storage.resizable() and storage.nbytes() == tensor.nbytes


def _takes_lone_rows(part: nn.Module) -> bool:
    if isinstance(part, (PackedLinear, ExactNorm)):
        return part.takes_lone_rows
    # made of such parts, and of operators on single numbers
    return isinstance(part, (ExactAttention, ExactMlp, Int8Mlp, PartialSum, nn.Identity))
