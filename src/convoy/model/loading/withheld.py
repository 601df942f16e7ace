"""Keep matrices as they are stored, while the library converts a model to float32.

The library makes a float32 tensor of every weight. Exact mode keeps matrices in the form of their file, so
their modules are taken out of the library's model before it loads weights, and put back with their matrices.
In all packed modes `lm_head` is packed or rounded slice by slice, so its tensor is withheld too, and that of
the embedding if they are tied: a float32 copy of the whole would be as large as the final weights.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.weights import Stored, StoredStack, dense_of
from convoy.model.layers.experts import is_experts
from convoy.model.quantize.parts import expert_names
from convoy.plan.spec.registry import FAMILIES

_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"
_LAYER = re.compile(r"model\.layers\.[0-9]+\.", re.ASCII)
_EXPERT = re.compile(r"(model\.layers\.[0-9]+\.)\S*\bexperts\.([0-9]+)\.([a-z0-9_]+)\.weight\Z", re.ASCII)


class Withheld:
    """Withhold from the library stored matrices and, if ``packed``, the tensors of `lm_head`.

    A tensor that was not read, or has another shape than the model's, is left to the library, which reports
    it. The library's model may live until the garbage collector frees it, and this object with it. So this
    object keeps tensors only until `give_back` or `release`.
    """

    def __init__(self, state: dict[str, Stored], family: str, *, packed: bool) -> None:
        """Store ``state``, the tensors read by name in the decoder. Withheld ones are taken out of it."""
        self._state = state
        self._family = family
        self._turned = FAMILIES[family].transposed_experts
        self._packed = packed
        self._taken: dict[str, Any] = {}
        self._held: dict[str, Stored] = {}

    def take(self, model: Any) -> None:
        """Take the modules out of ``model``, a library model that has no memory yet.

        Stored matrices without such a module are unpacked for the library.
        """
        self._take_ends(model)
        for name, module in list(model.named_modules()):
            if is_experts(module):
                self._take_experts(model, name, module)
            elif isinstance(module, nn.Linear | nn.Embedding) and self._is_kept(name, module):
                self._take(model, name)
        # the library builds a model on no device
        with torch.device("cpu"):
            for name, value in self._state.items():
                self._state[name] = dense_of(value, turned=self._turned)

    def give_back(self, model: nn.Module) -> None:
        """Restore the modules, with their weights in the form in which they were read."""
        for name, module in self._taken.items():
            for kind, _ in list(module.named_parameters(recurse=False)):
                value = self._held[f"{name}.{kind}"]
                if isinstance(value, torch.Tensor):
                    setattr(module, kind, nn.Parameter(value, requires_grad=False))
                else:
                    # a stored matrix is no parameter
                    delattr(module, kind)
                    setattr(module, kind, value)
            model.set_submodule(name, module)
        self.release()

    def release(self) -> None:
        """Forget all tensors."""
        self._state, self._held, self._taken = {}, {}, {}

    def _take_ends(self, model: Any) -> None:
        head = model.lm_head
        if not self._packed or not isinstance(head, nn.Linear):
            return
        if not model.config.tie_word_embeddings:
            if self._was_read(_HEAD, head):
                self._take(model, _HEAD)
        elif head.bias is None and self._was_read(_EMBEDDING, head):
            self._take(model, _EMBEDDING)
            self._held[f"{_HEAD}.weight"] = self._held[f"{_EMBEDDING}.weight"]
            self._take(model, _HEAD)
            # both modules are gone, so the library must not try to tie them
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop(f"{_HEAD}.weight", None)

    def _take_experts(self, model: nn.Module, name: str, experts: Any) -> None:
        """Take experts with a stack that is kept, or with matrices that the file has one by one."""
        self._stack_experts(name, experts)
        kinds = {kind: parameter.shape for kind, parameter in experts.named_parameters(recurse=False)}
        found = {kind: self._state.get(f"{name}.{kind}") for kind in kinds}
        if any(isinstance(one, StoredStack) for one in found.values()) and all(
            one is not None and _shape_in_library(one, experts) == kinds[kind] for kind, one in found.items()
        ):
            self._take(model, name)

    def _stack_experts(self, name: str, experts: Any) -> None:
        """Join the matrices of single experts to stacks, if all of them are kept.

        Those under names that the library does not join are left to it: it reports them.
        """
        layer, known = _LAYER.match(name), expert_names(self._family)
        roles = {} if known is None else {part: role for role, part in enumerate((*known[0], *known[1]))}
        names: dict[tuple[int, int], str] = {}
        for stored in self._state:
            match = _EXPERT.match(stored)
            if layer and match and match[1] == layer[0] and match[3] in roles:
                names[int(match[2]), roles[match[3]]] = stored
        matrices = {place: self._state[stored] for place, stored in names.items()}
        kept = {place: one for place, one in matrices.items() if isinstance(one, StoredMatrix)}
        numbers = range(experts.num_experts)
        if kept.keys() != {(number, role) for number in numbers for role in range(3)}:
            return
        if len({(role, one.shape) for (_, role), one in kept.items()}) != 3:
            # the library reports the shape that differs
            return
        for stored in names.values():
            del self._state[stored]
        joined = [StoredMatrix.joined([kept[number, 0], kept[number, 1]]) for number in numbers]
        self._state[f"{name}.gate_up_proj"] = StoredStack(tuple(joined))
        self._state[f"{name}.down_proj"] = StoredStack(tuple(kept[number, 2] for number in numbers))

    def _is_kept(self, name: str, module: nn.Module) -> bool:
        return isinstance(self._state.get(f"{name}.weight"), StoredMatrix) and self._was_read(name, module)

    def _was_read(self, name: str, module: nn.Module) -> bool:
        wanted = {f"{name}.{kind}": tensor.shape for kind, tensor in module.named_parameters()}
        return all(one in self._state and self._state[one].shape == shape for one, shape in wanted.items())

    def _take(self, model: nn.Module, name: str) -> None:
        module = self._taken[name] = model.get_submodule(name)
        for kind, _ in module.named_parameters(recurse=False):
            if f"{name}.{kind}" in self._state:
                self._held[f"{name}.{kind}"] = self._state.pop(f"{name}.{kind}")
        model.set_submodule(name, nn.Identity())


def _shape_in_library(value: Stored, experts: Any) -> tuple[int, ...]:
    if isinstance(value, StoredStack) and experts.is_transposed:
        count, outputs, inputs = value.shape
        return count, inputs, outputs
    return tuple(value.shape)
