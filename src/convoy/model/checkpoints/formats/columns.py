"""Unpack GPTQ and AWQ: matrices stored [inputs, outputs], with a scale and a zero per group and output.

Groups are runs of inputs. GPTQ packs eight inputs in a word (of four bits), and along the outputs its zeros,
less one. AWQ packs both along the outputs, in an order of its own. A value is ``(number - zero) * scale``,
and the matrix is transposed to [outputs, inputs].
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from convoy.errors import ModelError
from convoy.model.checkpoints.checkpoint import StoredTensor
from convoy.model.checkpoints.formats.unpacking import (
    FLOATS,
    Index,
    Parts,
    StoredLayout,
    Unpacking,
    part_of,
    require,
    require_rank,
)
from convoy.plan.spec.quantization import Quantization

if TYPE_CHECKING:
    import torch

    from convoy.model.kernels.stored.weights import Stored

_WORD = 32
_MAX_GROUP = 1 << 16
_IN_ORDER = tuple(range(8))
# the place in its word, of eight, at which each output is stored
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True)
class TurnedColumns(Unpacking):
    """Unpack a matrix [outputs, inputs] from ``weight``, ``zeros``, ``scales`` and optional ``places``.

    ``places`` gives each input's group where groups are not runs of inputs.
    """

    bits: int
    group_size: int
    # how ``weight`` is packed; zeros are always packed along the outputs
    packs_inputs: bool
    order: tuple[int, ...] = _IN_ORDER
    # added to each stored zero
    zero_offset: int = 0
    # whether the settings allow groups that are not runs of inputs
    shuffled: bool = False

    def pieces(self, parts: Parts) -> Iterator[tuple[Index, torch.Tensor]]:
        """Yield some inputs at a time, of all outputs."""
        import torch

        num_outputs, num_inputs = self.shape
        scales = parts["scales"].to(torch.float32)
        zeros = self._zeros(parts).to(torch.float32)
        groups = self._groups(parts, scales.shape[0])
        per_word = _WORD // self.bits
        for inputs in self.row_slices(num_inputs, num_outputs, per_word):
            if self.packs_inputs:
                words = parts["weight"][inputs.start // per_word : -(-inputs.stop // per_word)]
                codes = self._shifted(words.unsqueeze(1), (1, per_word, 1)).flatten(0, 1)
            else:
                codes = self._along_outputs(parts["weight"][inputs])
            of_group = groups[inputs]
            values = (codes.to(torch.float32) - zeros[of_group]) * scales[of_group]
            yield (slice(None), inputs), values.T

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of codes and scales, and a byte for each zero."""
        num_outputs, num_inputs = self.shape
        if num_inputs % 8:
            return 0
        scales, places = self.parts["scales"], 4 * num_inputs * self.shuffled
        return num_outputs * num_inputs * self.bits // 8 + scales.num_bytes + math.prod(scales.shape) + places

    @property
    def kept_form(self) -> str:
        """Return the form, if the settings say that groups are runs of inputs."""
        return "" if self.shuffled else f"centred{self.bits}"

    def kept(self, parts: Parts) -> Stored | None:
        """Return the matrix with codes along the inputs. Raises ModelError for an invalid group."""
        import torch

        from convoy.model.kernels.stored.matrix import PLACES, StoredMatrix, StoredRange

        num_outputs, num_inputs = self.shape
        groups = self._groups(parts, parts["scales"].shape[0])
        found = {
            "codes": parts["weight"].T if self.packs_inputs else self._packed_by_inputs(parts["weight"]),
            "scales": parts["scales"].T,
            "zeros": self._zeros(parts).to(torch.uint8).T,
        }
        if "places" in parts and not torch.equal(groups, torch.arange(num_inputs) // self.group_size):
            found[PLACES] = groups.to(torch.int32)
        group = 0 if self.group_size >= num_inputs else self.group_size
        return StoredMatrix((StoredRange(f"centred{self.bits}", num_outputs, num_inputs, found, group),))

    def _packed_by_inputs(self, words: torch.Tensor) -> torch.Tensor:
        """Return 4-bit codes packed along the inputs, two to a byte, uint8 [outputs, inputs / 2]."""
        import torch

        num_outputs, num_inputs = self.shape
        packed = torch.empty(num_outputs, num_inputs // 2, dtype=torch.uint8)
        for inputs in self.row_slices(num_inputs, num_outputs, 2):
            codes = self._along_outputs(words[inputs])
            packed[:, inputs.start // 2 : inputs.stop // 2] = (codes[0::2] | (codes[1::2] << 4)).T
        return packed

    def _zeros(self, parts: Parts) -> torch.Tensor:
        """Return the zeros, int32 [groups, outputs]."""
        zeros = self._along_outputs(parts["zeros"]) + self.zero_offset
        # a zero of 256 (8 bits, stored as 255) or 16 (4 bits, stored as 15) wraps around to 0
        return zeros.bitwise_and((1 << self.bits) - 1)

    def _along_outputs(self, words: torch.Tensor) -> torch.Tensor:
        """Unpack [n, words] to [n, outputs]."""
        return self._shifted(words.unsqueeze(-1), (1, 1, _WORD // self.bits)).flatten(1)

    def _shifted(self, words: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        import torch

        places = self.order if self.bits == 4 else range(_WORD // self.bits)
        shifts = torch.tensor([self.bits * place for place in places], dtype=torch.int32, device=words.device)
        return (words >> shifts.view(shape)).bitwise_and((1 << self.bits) - 1)

    def _groups(self, parts: Parts, num_groups: int) -> torch.Tensor:
        """Return the group of each input, int64 [inputs]. Raises ModelError for an invalid group."""
        import torch

        places = parts.get("places")
        if places is None:
            return torch.arange(self.shape[1], device=parts["scales"].device) // self.group_size
        places = places.to(torch.int64)
        if int(places.min()) < 0 or int(places.max()) >= num_groups:
            stored = self.parts["places"]
            raise ModelError(
                f"{stored.path}: {stored.name} names groups {int(places.min())} to {int(places.max())}, "
                f"expected 0 to {num_groups - 1}"
            )
        return places


@dataclass(frozen=True)
class _Packing:
    """Hold the settings that are the same for all matrices of a checkpoint."""

    bits: int
    # None means that all inputs are one group
    group_size: int | None
    packs_inputs: bool
    order: tuple[int, ...] = _IN_ORDER
    zero_offset: int = 0
    shuffled: bool = False


def describe_gptq(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe a GPTQ checkpoint. Raises ModelError naming settings or tensors that do not fit together."""
    settings = quantization.settings
    key = "checkpoint_format" if "checkpoint_format" in settings else "format"
    version = settings.get(key, "gptq")
    if version not in ("gptq", "gptq_v2"):
        raise quantization.wrong(key, "gptq or gptq_v2")
    dynamic = settings.get("dynamic") or {}
    # rules that begin so leave modules as they are, and the tensors show these
    if not isinstance(dynamic, Mapping) or not all(rule.startswith("-:") for rule in dynamic):
        raise quantization.wrong("dynamic", "the same bits and groups for all modules")
    bits, group_size = _bits(quantization, (2, 4, 8)), _group_size(quantization)
    # the first version stores each zero minus one
    offset = 1 if version == "gptq" else 0
    shuffled = settings.get("desc_act") is not False
    return _layout(
        tensors, _Packing(bits, group_size, packs_inputs=True, zero_offset=offset, shuffled=shuffled)
    )


def describe_awq(quantization: Quantization, tensors: Mapping[str, StoredTensor]) -> StoredLayout:
    """Describe an AWQ checkpoint. Raises ModelError naming settings or tensors that do not fit together."""
    if str(quantization.settings.get("version", "gemm")).lower() != "gemm":
        raise quantization.wrong("version", "gemm")
    bits, group_size = _bits(quantization, (4,)), _group_size(quantization)
    return _layout(tensors, _Packing(bits, group_size, packs_inputs=False, order=_AWQ_ORDER))


def _layout(tensors: Mapping[str, StoredTensor], packing: _Packing) -> StoredLayout:
    modules = [name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")]
    return StoredLayout({f"{module}.weight": _turned(module, tensors, packing) for module in modules})


def _turned(module: str, tensors: Mapping[str, StoredTensor], packing: _Packing) -> TurnedColumns:
    weight = require_rank(require(tensors[f"{module}.qweight"], ("I32", "U32")), 2)
    per_word = _WORD // packing.bits
    num_inputs, num_outputs = weight.shape
    if packing.packs_inputs:
        num_inputs *= per_word
    else:
        num_outputs *= per_word
    group_size = packing.group_size or num_inputs
    if num_inputs % group_size:
        raise ModelError(
            f"{weight.path}: {weight.name} has {num_inputs} inputs, expected a multiple of the "
            f"group_size {group_size}"
        )
    if num_outputs % per_word:
        raise ModelError(
            f"{weight.path}: {weight.name} has {num_outputs} outputs, expected a multiple of {per_word}"
        )
    num_groups = num_inputs // group_size
    zeros = part_of(tensors, f"{module}.qzeros", weight.name)
    scales = part_of(tensors, f"{module}.scales", weight.name)
    parts = {
        "weight": weight,
        "zeros": require(zeros, ("I32", "U32"), (num_groups, num_outputs // per_word)),
        "scales": require(scales, FLOATS, (num_groups, num_outputs)),
    }
    places = tensors.get(f"{module}.g_idx")
    if places is not None:
        parts["places"] = require(places, ("I32", "I64"), (num_inputs,))
    return TurnedColumns(
        f"{module}.weight",
        (num_outputs, num_inputs),
        parts,
        packing.bits,
        group_size,
        packing.packs_inputs,
        packing.order,
        packing.zero_offset,
        shuffled=packing.shuffled and places is not None,
    )


def _bits(quantization: Quantization, known: tuple[int, ...]) -> int:
    key = "bits" if "bits" in quantization.settings else "w_bit"
    bits = quantization.reader.count(key, most=_WORD)
    if bits not in known:
        raise quantization.wrong(key, f"one of {', '.join(map(str, known))}")
    return bits


def _group_size(quantization: Quantization) -> int | None:
    """Return the group size; None means that all inputs are one group."""
    key = "group_size" if "group_size" in quantization.settings else "q_group_size"
    if quantization.settings.get(key) == -1:
        return None
    return quantization.reader.count(key, most=_MAX_GROUP)
