"""Slice each tensor for one rank, and narrow a model's configuration to such slices.

The library's own plan for its layers says which linears are split by outputs ("colwise") and which by inputs
("rowwise"). It lacks some models, GPT-OSS among them, and it gathers where q, k and v are one matrix. The
table `_OWN` covers these cases. A slice that does not fit the narrowed model is refused when that model is
built.
"""

from __future__ import annotations

import re
from typing import Any, overload

import torch
import transformers
from torch import nn

from convoy.errors import ModelError
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.weights import (
    Stored,
    StoredStack,
    Weight,
    join_rows,
    plain_matrix,
    take_rows,
)
from convoy.plan.spec.model import ModelSpec
from convoy.plan.spec.registry import FAMILIES
from convoy.plan.spec.sharding import Shard, first_kv_head, kv_heads_of

_SPLIT = ("colwise", "rowwise", "packed_colwise")
_OWN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3", "sinks"), "colwise"),
    # projections out of the latents of multi-head latent attention
    **dict.fromkeys(("q_b_proj", "kv_b_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj", "w2"), "rowwise"),
    "gate_up_proj": "packed_colwise",
    "qkv_proj": "joined",
}
_OTHER_RANKS = "ask for another number of ranks with --ranks, or hold whole layers: --parallel pipeline"
_BY_TOKEN = ("model.embed_tokens.", "model.embed_tokens_per_layer.", "lm_head.")
_KEYS = ("k_proj", "v_proj")
_LAYER = re.compile(r"model\.layers\.([0-9]+)\.", re.ASCII)
_EXPERT = re.compile(r"\.experts\.([0-9]+)\.", re.ASCII)
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")


def narrow_config(config: Any, spec: ModelSpec, shard: Shard) -> None:
    """Change a `transformers` configuration to that of one rank's slices. Heads keep their size."""
    size = shard.world_size
    # Gemma 4's full-attention layers have another number of K/V heads
    of_layers = config.to_dict().get("per_layer_config")
    if of_layers:
        config.per_layer_config = None
    if getattr(config, "head_dim", None) is None:
        # set it now: the library would derive it from the narrowed number of heads
        config.head_dim = spec.head_dim
    of_experts = {FAMILIES[spec.family].expert_width_key}
    widths = set(_WIDTHS) - (of_experts if shard.experts == "whole" else set())
    for name in ("num_attention_heads", *widths):
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, getattr(config, name) // size)
    for name in _KV_HEADS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, kv_heads_of(getattr(config, name), size))
    config.vocab_size = -(-spec.vocab_size // size)
    # the padding id may lie outside of this rank's part of the vocabulary
    config.pad_token_id = None
    if any(getattr(config, name, None) and getattr(config, name) % 4 for name in widths):
        # grouped matmuls need rows that are a multiple of 16 bytes
        config._experts_implementation = "eager"
    if of_layers:
        config.per_layer_config = {
            layer: {
                name: kv_heads_of(value, size) if name in _KV_HEADS else value
                for name, value in values.items()
            }
            for layer, values in of_layers.items()
        }


class Slices:
    """Compute one rank's slice of each tensor, by the tensor's name in the decoder."""

    def __init__(self, spec: ModelSpec, shard: Shard) -> None:
        self.shard = shard
        self._spec = spec
        plan: dict[str, str] = transformers.CONFIG_MAPPING[spec.family].base_model_tp_plan or {}
        self._plan = plan

    def name(self, name: str) -> str | None:
        """Return the tensor's name in the narrowed model, or None if it is an expert of another rank."""
        expert = _EXPERT.search(name)
        if self.shard.experts == "split" or expert is None:
            return name
        number = int(expert[1]) - self._own_experts(name).start
        if not 0 <= number < len(self._own_experts(name)):
            return None
        return f"{name[: expert.start(1)]}{number}{name[expert.end(1) :]}"

    @overload
    def take(self, name: str, value: torch.Tensor) -> torch.Tensor: ...

    @overload
    def take(self, name: str, value: Stored) -> Stored: ...

    def take(self, name: str, value: Stored) -> Stored:
        """Return the rank's slice of a tensor or of stored matrices, a view where possible.

        Raises ModelError if it cannot be split. A bias added after a row-wise product is summed over the
        ranks, so all ranks but the first hold zeros.
        """
        style, leaf = self._style(name)
        if style and ".experts." in name and self.shard.experts == "whole":
            return value if _EXPERT.search(name) else self._experts(name, value)
        if isinstance(value, StoredStack):
            own = tuple(
                self._matrix(name, one, style, leaf, joined=value.is_joined) for one in value.matrices
            )
            return StoredStack(own, value.is_joined)
        if name.startswith(_BY_TOKEN):
            return self._rows_of_vocabulary(value)
        if isinstance(value, StoredMatrix):
            return self._matrix(name, value, style, leaf)
        return self._tensor(name, value, style, leaf)

    def _experts(self, name: str, value: Stored) -> Stored:
        """Return the rank's experts of a stack."""
        own = self._own_experts(name)
        rows = slice(own.start, own.stop)
        if isinstance(value, StoredStack):
            return StoredStack(value.matrices[rows], value.is_joined)
        return take_rows(value, rows)

    def _tensor(self, name: str, value: torch.Tensor, style: str, leaf: str) -> torch.Tensor:
        if not style or (style == "rowwise" and name.endswith("bias")):
            return torch.zeros_like(value) if style and self.shard.rank else value
        dim = self._dimension(style, name, value)
        parts = self._parts(name, value, (style, leaf), value.shape[dim])
        found = [value.narrow(dim, part.start, part.stop - part.start) for part in parts]
        return found[0] if len(found) == 1 else torch.cat(found, dim)

    def _matrix(
        self, name: str, matrix: StoredMatrix, style: str, leaf: str, *, joined: bool = False
    ) -> StoredMatrix:
        """Return the rank's slice of a stored matrix [outputs, inputs].

        ``joined``: the outputs of an expert's gate lie before those of its up, in any family.
        """
        if not style:
            return matrix
        if style == "rowwise":
            (inputs,) = self._parts(name, matrix, (style, leaf), matrix.shape[1])
            try:
                return matrix.columns(inputs)
            except ModelError as error:
                raise ModelError(f"{name}: {error.message}", hint=_OTHER_RANKS) from error
        parts = self._parts(name, matrix, (style, leaf), matrix.shape[0], joined=joined)
        return StoredMatrix.joined([matrix.rows(part) for part in parts])

    def _parts(
        self, name: str, value: Stored, style: tuple[str, str], size: int, *, joined: bool = False
    ) -> list[slice]:
        """Return the rank's runs of the ``size`` outputs or inputs that ranks share."""
        kind, leaf = style
        if kind == "joined":
            # queries, keys and values, one behind the other
            queries, keys = self._heads(name)
            if size % (queries + 2 * keys):
                raise self._no_slice(name, value)
            each = size // (queries + 2 * keys)
            firsts = queries * each, (queries + keys) * each
            of_keys = [self._of_keys(name, value, slice(first, first + keys * each)) for first in firsts]
            return [self._share(name, value, slice(0, firsts[0])), *of_keys]
        if leaf in _KEYS:
            return [self._of_keys(name, value, slice(0, size))]
        if kind == "packed_colwise" and (joined or not self._turned(name)):
            halves = slice(0, size // 2), slice(size // 2, size)
            return [self._share(name, value, half) for half in halves]
        return [self._share(name, value, slice(0, size))]

    def _style(self, name: str) -> tuple[str, str]:
        module = re.sub(r"(\.weight|\.bias|_bias)\Z", "", name)
        leaf = module.rpartition(".")[2]
        if not _LAYER.match(name):
            return "", leaf
        style = self._plan.get(_LAYER.sub("layers.*.", module), "")
        return (style if style in _SPLIT else _OWN.get(leaf, "")), leaf

    def _turned(self, name: str) -> bool:
        return FAMILIES[self._spec.family].transposed_experts and ".experts." in name

    def _dimension(self, style: str, name: str, tensor: torch.Tensor) -> int:
        is_bias = name.endswith("bias")
        if self._turned(name):
            return -1 if style != "rowwise" else 1
        if style == "rowwise":
            return -1
        return -2 if tensor.ndim > 1 and not is_bias else -1

    def _heads(self, name: str) -> tuple[int, int]:
        layer = _LAYER.match(name)
        number = -1 if layer is None else int(layer[1])
        group = next((group for group in self._spec.cache_groups if number in group.layers), None)
        if group is None:
            raise ModelError(f"{self._spec.name}: {name} is of no layer with heads")
        return group.num_heads, group.num_kv_heads

    def _of_keys(self, name: str, value: Stored, run: slice) -> slice:
        """Return the rank's part of K or V. Several ranks share a head if there are fewer K/V heads than
        ranks.
        """
        num_heads = self._heads(name)[1]
        if (run.stop - run.start) % num_heads:
            raise self._no_slice(name, value)
        size = (run.stop - run.start) // num_heads
        first, count = first_kv_head(num_heads, self.shard), kv_heads_of(num_heads, self.shard.world_size)
        return slice(run.start + first * size, run.start + (first + count) * size)

    def _share(self, name: str, value: Stored, run: slice) -> slice:
        if (run.stop - run.start) % self.shard.world_size:
            raise self._no_slice(name, value)
        size = (run.stop - run.start) // self.shard.world_size
        return slice(run.start + self.shard.rank * size, run.start + (self.shard.rank + 1) * size)

    def _rows_of_vocabulary(self, value: Weight) -> Weight:
        """Return the rank's rows. All ranks hold the same number; the last rank's are padded with zeros."""
        count = -(-value.shape[0] // self.shard.world_size)
        own = take_rows(value, slice(self.shard.rank * count, (self.shard.rank + 1) * count))
        missing = count - own.shape[0]
        if not missing:
            return own
        if isinstance(own, torch.Tensor):
            return nn.functional.pad(own, (0, 0) * (own.ndim - 1) + (0, missing))
        return join_rows([own, plain_matrix(torch.zeros(missing, own.shape[1], dtype=torch.bfloat16))])

    def _own_experts(self, name: str) -> range:
        layer = _LAYER.match(name)
        count = 0 if layer is None else self._spec.layers[int(layer[1])].num_experts
        count //= self.shard.world_size
        return range(self.shard.rank * count, (self.shard.rank + 1) * count)

    def _no_slice(self, name: str, value: Stored) -> ModelError:
        return ModelError(
            f"{name} has shape {list(value.shape)}, which {self.shard.world_size} ranks cannot share alike"
        )
