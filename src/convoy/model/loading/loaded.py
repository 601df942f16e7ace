"""Hold the modules of a model that a stage has loaded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from convoy.model.kernels.linear import PackedLinear
from convoy.model.kernels.stored.embedding import Embedding, StoredEmbedding
from convoy.model.kernels.stored.linear import StoredLinear, stored_linear
from convoy.model.kernels.stored.weights import Weight
from convoy.model.layers.exact import ExactAttention, ExactMlp, ExactNorm
from convoy.model.layers.experts import ExactRouter, RouterScores
from convoy.model.layers.layer_inputs import LayerInputs
from convoy.model.layers.rope import RopeUse
from convoy.model.parallel.ranks import PartialSum, Ranks
from convoy.model.parallel.vocabulary import VocabularyPart
from convoy.wire.messages.control import StageAssignment

_log = logging.getLogger(__name__)


@dataclass
class LoadedModules:
    """Hold a stage's modules; modules that the stage does not own are None."""

    embedding: Embedding | VocabularyPart | None
    # by number in the whole model
    layers: dict[int, nn.Module]
    norm: nn.Module | None
    output: nn.Module | None  # lm_head
    rotary: nn.Module
    ropes: dict[int, RopeUse]  # by layer
    # factor of embeddings
    embed_scale: float | None
    logit_scale: float | None
    # bound of the logits, which tanh applies
    logit_cap: float | None
    # inputs of layers that take token ids
    layer_inputs: LayerInputs | None
    bytes_read: int
    # set if these modules are one rank's slices: the ranks that share the stage
    ranks: Ranks | None = None

    @property
    def is_ours(self) -> bool:
        """Tell whether all attention is `ExactAttention`, which the checks of linears and heads cover."""
        return all(rope.spread is not None for rope in self.ropes.values())

    @property
    def takes_lone_rows(self) -> bool:
        """Tell whether a single row gets the same bits alone as in a larger batch, in all parts of the
        layers.
        """
        layers = list(self.layers.values())
        inner = [part for layer in layers for part in layer.modules() if part is not layer]
        return self.is_ours and all(_takes_lone_rows(part) for part in (*inner, *self._ends))

    @property
    def _ends(self) -> list[nn.Module]:
        """Return the output's modules that are present."""
        return [part for part in (self.norm, self.output) if part is not None]

    def parts(self) -> list[nn.Module]:
        """Return all modules with weights."""
        ends = (self.embedding, self.norm, self.output, self.layer_inputs)
        return [*self.layers.values(), *(part for part in ends if part is not None)]

    def settle(self, *, packed: bool) -> None:
        """Pack `lm_head` if wanted and still as stored, and copy all memory that is not the modules' own.

        Views of the mapped file are copied: a file that changes must not change a running model.
        """
        looked_up = (self.embedding, None if self.layer_inputs is None else self.layer_inputs.embedding)
        tables = {table for table in looked_up if isinstance(table, StoredEmbedding)}
        if packed and isinstance(self.output, nn.Linear):
            weight: Weight = self.output.weight
            self.output = stored_linear(weight, self.output.bias)
            for table in [table for table in tables if table.matrix is weight]:
                assert isinstance(self.output, StoredLinear), "made of a stored matrix"
                table.share(self.output)
                tables.remove(table)
        for table in tables:
            table.own_memory()
        self._own_memory()

    def _own_memory(self) -> None:
        # copies by address, so that a tied matrix stays a single one
        copies: dict[int, torch.Tensor] = {}
        for part in self.parts():
            part.requires_grad_(False)
            for tensor in (*part.parameters(), *part.buffers()):
                if _is_own(tensor):
                    continue
                address = tensor.data_ptr()
                if address not in copies:
                    copies[address] = tensor.data.clone()
                    # a module may be in two parts: recognise its copy as well
                    copies[copies[address].data_ptr()] = copies[address]
                tensor.data = copies[address]

    def free(self) -> LoadedModules:
        """Return a copy without any module that has weights."""
        return replace(self, layers={}, ropes={}, embedding=None, norm=None, output=None, layer_inputs=None)

    def narrow(self, assignment: StageAssignment) -> None:
        """Free the modules that ``assignment`` does not own.

        Embedding and output are kept only if the ownership of both is unchanged: where they are tied, each
        depends on the other.
        """
        for layer in [i for i in self.layers if not assignment.start <= i < assignment.end]:
            del self.layers[layer], self.ropes[layer]
        held = self.embedding is not None, self.output is not None
        if held != (assignment.embed, assignment.output):
            self.embedding = self.norm = self.output = None

    def round_inputs(self) -> None:
        """Round rows to 8 bits for all linears in forms with products of whole numbers, routers apart.

        The other forms are multiplied exactly, and a warning names them, once. Raises SelfCheckError where
        no compiled code has the bits of the definition.
        """
        inner = (self.layer_inputs, *self.layers.values(), self.output)
        linears = [one for part in inner if part is not None for one in _rounding_linears(part)]
        stored = [one for one in linears if isinstance(one, StoredLinear)]
        for one in stored:
            one.round_inputs()
        forms = {form for one in stored for form in one.exact_forms}
        forms |= {"F32" for one in linears if type(one) is PackedLinear}
        warn_of_exact_forms(tuple(sorted(forms)))

    @property
    def linears(self) -> list[PackedLinear]:
        """Return all packed linears in the order of the layers, `lm_head` last; none outside exact mode."""
        parts = [*self.layers.values(), *(part for part in (self.output,) if part is not None)]
        return [m for part in parts for m in part.modules() if isinstance(m, PackedLinear)]

    @property
    def step_bytes(self) -> int:
        """Return the bytes of `weight_bytes` that a step using every expert reads: all but the embedding."""
        if self.embedding is None:
            return self.weight_bytes
        found = self.embedding
        table = found.table if isinstance(found, VocabularyPart) else found
        # a tied matrix that is stored once is read all the same, as `lm_head`
        if isinstance(table, StoredEmbedding):
            return self.weight_bytes - table.num_bytes
        output = getattr(self.output, "weight", None)
        tied = isinstance(output, torch.Tensor) and output.data_ptr() == table.weight.data_ptr()
        return self.weight_bytes - (0 if tied else table.weight.nbytes)

    @property
    def weight_bytes(self) -> int:
        """Return the resident bytes; a tied matrix that is stored once counts once."""
        # count parameters, and the buffers that a checkpoint has
        plain: dict[int, int] = {
            t.data_ptr(): t.nbytes for part in self.parts() for t in part.state_dict().values()
        }
        inner = [module for part in self.parts() for module in part.modules()]
        packed = [module.weight_bytes for module in inner if isinstance(module, PackedLinear)]
        tables = {module: module.num_bytes for module in inner if isinstance(module, StoredEmbedding)}
        return sum(plain.values()) + sum(packed) + sum(tables.values())


def _rounding_linears(module: nn.Module) -> Iterator[PackedLinear]:
    """Yield the linears of a module for which rows may be rounded.

    A router is left out: it chooses experts by scores that lie close together, and weighs next to nothing.
    """
    if isinstance(module, PackedLinear):
        yield module
    for child in module.children():
        # The plan counts both kinds in float32.
        if not isinstance(child, ExactRouter | RouterScores):
            yield from _rounding_linears(child)


# Kept, so that a warning appears once and not for each stage.
@functools.cache
def warn_of_exact_forms(forms: tuple[str, ...]) -> None:
    """Warn of forms without products of whole numbers."""
    if forms:
        _log.warning(
            "--compute int8 has no 8-bit products for weights stored as %s: linears with such weights stay "
            "exact, at the speed of exact mode",
            " and ".join(forms),
        )


def _is_own(tensor: torch.Tensor) -> bool:
    """Tell whether the memory is torch's and holds nothing else.

    Copying such a tensor would only double its memory for a while.
    """
    storage = tensor.untyped_storage()
    return storage.resizable() and storage.nbytes() == tensor.nbytes


def _takes_lone_rows(part: nn.Module) -> bool:
    if isinstance(part, (PackedLinear, ExactNorm)):
        return part.takes_lone_rows
    # these consist of the parts above and of elementwise operators
    return isinstance(part, (ExactAttention, ExactMlp, PartialSum, nn.Identity))
