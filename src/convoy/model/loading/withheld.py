"""The matrix of the output as it is stored, kept from the library while that makes float32 of a model.

In exact mode `lm_head` is packed or rounded, slice by slice. A float32 copy of the whole matrix would stand
beside that: of a large vocabulary as much as what stays. A tied embedding stays as it is stored, too, beside
the packed one, which nobody can look up by row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"


class Withheld:
    """`lm_head`, and the embedding where they are tied, without the numbers.

    What was not read, or has another shape than the model's, is left to the library, which says so. Keeps no
    tensor: the library's classes live until they are collected, and this with them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        """``state``: what was read, by its names in the decoder; of nothing, nothing is withheld."""
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._taken: dict[str, Any] = {}
        self._tied = False

    def take(self, model: Any) -> None:
        """Take them out of ``model``, which is the library's, with an output and without memory yet."""
        head = model.lm_head
        if not isinstance(head, nn.Linear):
            return
        if not model.config.tie_word_embeddings:
            if self._was_read(_HEAD, head):
                self._take(model, _HEAD)
        elif head.bias is None and self._was_read(_EMBEDDING, head):
            self._tied = True
            self._take(model, _HEAD)
            self._take(model, _EMBEDDING)
            # there is nothing left to tie
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop(f"{_HEAD}.weight", None)

    def give_back(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Put them back with what was read, of the dtype that it has; what is tied is one parameter."""
        stored: dict[str, nn.Parameter] = {}
        for name, module in self._taken.items():
            for kind, _ in list(module.named_parameters()):
                whose = f"{_EMBEDDING if self._tied else name}.{kind}"
                stored.setdefault(whose, nn.Parameter(state[whose], requires_grad=False))
                setattr(module, kind, stored[whose])
            model.set_submodule(name, module)

    def _was_read(self, name: str, module: nn.Module) -> bool:
        wanted = {f"{name}.{kind}": tensor.shape for kind, tensor in module.named_parameters()}
        return all(self._shapes.get(one) == shape for one, shape in wanted.items())

    def _take(self, model: nn.Module, name: str) -> None:
        self._taken[name] = model.get_submodule(name)
        model.set_submodule(name, nn.Identity())
