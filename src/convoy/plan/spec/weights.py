"""The size of a decoder layer's weights: all of them in memory, and those that a token passes.

They differ if there are experts: a token takes few of them, and a batch some more.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from convoy.config.kernels import DTYPE_BYTES, form_of
from convoy.plan.spec.family import Shape

# Not rounded: the scores of experts, MLA's expansion, the output of each group of DeepSeek V4's heads, and
# norms of single heads. The last three are in no linear of a stage.
_ROUTER = re.compile(r"(\A|\.)(gate|router)(\.proj|\.layer)?\.weight\Z", re.ASCII)
_NO_LINEAR = ("kv_b_proj.weight", "o_a_proj.weight", "conv1d.weight", "table.weight", "norm.weight")
_EXPERT = re.compile(r"\bexperts\.([0-9]+)\.")
_STACK = re.compile(r"\bexperts\.[a-z_]+\Z")
_ALONE = re.compile(r"\bexperts\.[0-9]+\.([a-z0-9_]+)\.weight\Z")
# The matrices of one expert that a stack joins, as files name them that store experts one by one.
_IN_STACK = {"gate_up_proj": ("gate_proj", "w1", "up_proj", "w3"), "down_proj": ("down_proj", "w2")}

Use = Literal["each", "expert", "looked up"]
# How ranks share a matrix: by its outputs or by its inputs; "keys", by the outputs of K/V heads, of which
# several ranks may have the same; "joined", those of queries, keys and values; "" not at all.
Split = Literal["", "outputs", "inputs", "keys", "joined"]
_SPLITS: dict[str, Split] = {
    **dict.fromkeys(("q_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "sinks"), "outputs"),
    **dict.fromkeys(("q_b_proj", "kv_b_proj"), "outputs"),  # of latents
    **dict.fromkeys(("o_proj", "down_proj", "w2"), "inputs"),
    **dict.fromkeys(("k_proj", "v_proj"), "keys"),
    "qkv_proj": "joined",
}


# Outputs, inputs, the split, and the bytes in the form of the file and on a CUDA device.
_Key = tuple[int, int, Split, int, int]


@dataclass(frozen=True)
class Matrix:
    """Hold the shape of ``count`` linears of [outputs, inputs] that a kernel may round."""

    outputs: int
    inputs: int
    count: int = 1
    split: Split = ""
    # Of one matrix in the form of its file, for kernels that keep it; 0 for float32.
    kept_bytes: int = 0
    # Of its codes and scales on a CUDA device; 0 where it is unpacked there.
    card_bytes: int = 0

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs * self.count


@dataclass(frozen=True)
class WeightPart:
    """Hold linears, and the elements of all other weights: norms, biases, routers."""

    linears: tuple[Matrix, ...] = ()
    others: int = 0
    # Those of ``others`` that ranks share as a matrix's outputs, and as outputs of K/V heads.
    others_split: int = 0
    others_keys: int = 0

    @property
    def elements(self) -> int:
        return sum(matrix.elements for matrix in self.linears) + self.others

    def num_bytes(self, word: str) -> int:
        """Return the bytes as a kernel (`config.kernels`) holds them."""
        form = form_of(word)
        linears = sum(
            m.count * form.linear_bytes(m.outputs, m.inputs, kept_bytes=m.kept_bytes, card_bytes=m.card_bytes)
            for m in self.linears
        )
        return linears + self.others * DTYPE_BYTES[form.dtype]


@dataclass(frozen=True)
class LayerWeights:
    """Hold one layer's weights by use: passed by every token, by some experts, or looked up by id."""

    each: WeightPart
    # Of all experts together.
    experts: WeightPart = WeightPart()
    num_experts: int = 0
    # Elements of tables, of which a token reads a row.
    looked_up: int = 0

    @property
    def elements(self) -> int:
        return self.each.elements + self.experts.elements + self.looked_up

    def num_bytes(self, word: str) -> int:
        """Return the bytes in memory under a kernel."""
        tables = self.looked_up * DTYPE_BYTES[form_of(word).dtype]
        return self.each.num_bytes(word) + self.experts.num_bytes(word) + tables

    def used_elements(self, chosen: int) -> float:
        """Return the elements that one token is multiplied with if it goes to ``chosen`` of the experts."""
        return self.each.elements + self.experts.elements * self.chosen_share(chosen)

    def reached_share(self, chosen: int, num_tokens: float) -> float:
        """Return the share of the experts that any of ``num_tokens`` reaches, if each chooses by itself."""
        return 1 - math.pow(1 - self.chosen_share(chosen), num_tokens)

    def chosen_share(self, chosen: int) -> float:
        """Return the share of the experts that one token goes to."""
        return min(1.0, chosen / self.num_experts) if self.num_experts else 0.0


def layer_weights(
    tensors: Iterable[tuple[str, Shape]],
    hidden_size: int,
    *,
    looked_up: int = 0,
    kept: Mapping[str, int] | None = None,
    on_card: Mapping[str, int] | None = None,
) -> LayerWeights:
    """Return the sums over names and shapes behind ``model.layers.N.``; experts may be stacked or not.

    ``kept`` has the bytes of tensors in the form of their file, by the same names, for kernels that keep it.
    ``on_card`` has those of codes and scales on a CUDA device.
    """
    kept, on_card = kept or {}, _whole_joins(on_card or {})
    linears: dict[Use, Counter[_Key]] = {"each": Counter(), "expert": Counter()}
    others: Counter[Use] = Counter()
    shared: Counter[tuple[Use, Split]] = Counter()
    numbers: set[int] = set()
    for name, shape in tensors:
        alone = _EXPERT.search(name)
        if alone:
            numbers.add(int(alone[1]))
        stacked = _STACK.search(name) is not None and len(shape) >= 2
        if stacked:
            numbers.update(range(shape[0]))
        use: Use = "expert" if alone or stacked else "each"
        if stacked and len(shape) == 3:
            linears[use].update(_of_stack(name, shape, hidden_size, kept))
        elif len(shape) == 2 and is_linear(name):
            key = (*shape, split_of(name), kept.get(name, 0), on_card.get(name, 0))
            linears[use][key] += 1
        else:
            others[use] += math.prod(shape)
            shared[use, split_of(name)] += math.prod(shape)
    each, experts = (
        WeightPart(
            tuple(
                Matrix(outputs, inputs, count, split, kept_bytes, card_bytes)
                for (outputs, inputs, split, kept_bytes, card_bytes), count in sorted(linears[use].items())
            ),
            others[use],
            *(shared[use, "outputs"], shared[use, "keys"]),
        )
        for use in ("each", "expert")
    )
    return LayerWeights(each, experts, len(numbers), looked_up)


def split_of(name: str) -> Split:
    """Return how ranks share a tensor of a layer.

    A bias follows its matrix; one of a matrix by inputs is not shared.
    """
    leaf = name.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias").rpartition(".")[2]
    return _SPLITS.get(leaf, "")


def is_linear(name: str) -> bool:
    """Return whether a layer's tensor of two dimensions is a linear's matrix, by its name.

    Kernels round such a matrix, or keep it in the form of its file.
    """
    return name.endswith(".weight") and not is_router(name) and not name.endswith(_NO_LINEAR)


def is_router(name: str) -> bool:
    """Return whether a layer's tensor is the matrix by which a router scores experts, by its name.

    No kernel rounds it: experts may have scores that lie close together.
    """
    return _ROUTER.search(name) is not None


def _of_stack(name: str, shape: Shape, hidden_size: int, kept: Mapping[str, int]) -> Counter[_Key]:
    """Return the matrices of a stack: one for each expert in either orientation, and two for gate and up."""
    count, between = shape[0], math.prod(shape[1:]) // hidden_size
    num_bytes, split = _stack_bytes(name, count, kept), split_of(name)
    if "gate_up" in name:
        return Counter({(between // 2, hidden_size, split, num_bytes // (2 * count), 0): 2 * count})
    return Counter({(hidden_size, between, split, num_bytes // count, 0): count})


def _whole_joins(on_card: Mapping[str, int]) -> dict[str, int]:
    """Return the matrices without those that a device unpacks because another one of the join is unpacked."""
    joins = [[f"self_attn.{one}_proj.weight" for one in "qkv"]]
    joins += [[f"mlp.{one}_proj.weight" for one in ("gate", "up")]]
    parted = {name for join in joins if not all(one in on_card for one in join) for name in join}
    return {name: num_bytes for name, num_bytes in on_card.items() if name not in parted}


def _stack_bytes(name: str, count: int, kept: Mapping[str, int]) -> int:
    """Return the bytes of a stack as its file keeps it, also if the file has its experts one by one."""
    if name in kept:
        return kept[name]
    leaf = name.rpartition(".")[2]
    alone = {part: match[1] for part in kept if (match := _ALONE.search(part))}
    parts = [part for part, role in alone.items() if role in _IN_STACK.get(leaf, ())]
    return sum(kept[part] for part in parts) if len(parts) == count * len(_IN_STACK[leaf]) // 2 else 0
