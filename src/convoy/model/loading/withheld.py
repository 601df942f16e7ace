"""Keep the output's matrix as it is stored, while the library converts a model to float32.

In exact mode `lm_head` is packed or rounded, slice by slice. A float32 copy of the whole matrix would be in
memory at the same time; with a large vocabulary, it is as large as the final weights. A tied embedding also
stays as it is stored, beside the packed matrix, because packed rows cannot be looked up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_HEAD, _EMBEDDING = "lm_head", "model.embed_tokens"


class Withheld:
    """Withhold the numbers of `lm_head`, and of the embedding if they are tied, from the library.

    A tensor that was not read, or has another shape than the model's, is left to the library, which reports
    it. This object keeps no tensor, because the library's classes live until the garbage collector frees
    them, and this object with them.
    """

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        """Store the shapes of ``state``, the tensors read, by name in the decoder; if empty, nothing is
        withheld.
        """
        self._shapes = {name: tensor.shape for name, tensor in state.items()}
        self._taken: dict[str, Any] = {}
        self._tied = False

    def take(self, model: Any) -> None:
        """Take the modules out of ``model``, a library model with an output that has no memory yet."""
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
            # both modules are gone, so the library must not try to tie them
            model.config.tie_word_embeddings = False
            model.all_tied_weights_keys.pop(f"{_HEAD}.weight", None)

    def give_back(self, model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the modules with the tensors read, in their stored dtype; tied ones are one parameter."""
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
