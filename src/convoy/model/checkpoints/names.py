"""Translate the names of stored tensors to those of the text decoder, and find its matrices among them.

It is apart from `owned` because a source needs it, and `owned` selects from a source.
"""

from __future__ import annotations

import re

from convoy.plan.spec.weights import is_linear

_LAYER = re.compile(r"model\.layers\.[0-9]{1,6}\.", re.ASCII)
EMBEDDING = "model.embed_tokens.weight"
_ENDS = (EMBEDDING, "lm_head.weight")
_STACK = re.compile(r"\.experts\.(gate_up_proj|down_proj)\Z", re.ASCII)
# DeepSeek V4's files use other prefixes; the library itself translates the names within a layer
_OTHER_NAMES = {
    "embed.": "model.embed_tokens.",
    "head.": "lm_head.",
    "norm.": "model.norm.",
    "hc_head_": "model.hc_head.hc_",
    "layers.": "model.layers.",
}


def decoder_name(name: str) -> str:
    """Return a tensor's name in the text decoder alone, also where its model holds more than text."""
    for prefix, known in _OTHER_NAMES.items():
        if name.startswith(prefix):
            return known + name.removeprefix(prefix)
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of the decoder is a matrix that linears multiply by or tokens are looked up in.

    A stack of experts counts as one too. Exact mode keeps these in the form of their file. A single output
    is none: packed linears have another layout for it.
    """
    if len(shape) == 3:
        return _STACK.search(name) is not None and _LAYER.match(name) is not None
    is_wide = len(shape) == 2 and shape[0] > 1
    return is_wide and (name in _ENDS or (_LAYER.match(name) is not None and is_linear(name)))
