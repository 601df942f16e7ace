"""Hold a stage's weights on the device, with each layer's tensors joined into few matrices.

Linears keep the codes and scales of a quantised file where `kernels.packing` has a layout for its form. All
other weights are in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from convoy.config.kernels import KernelForm
from convoy.errors import ModelError
from convoy.model.backends.cuda.kernels.float8 import (
    fits_float8,
    of_float8,
    round_to_float8,
)
from convoy.model.backends.cuda.kernels.forms import DeviceMatrix, Matrix
from convoy.model.backends.cuda.kernels.packing import has_layout, pack_matrix, round_on_device
from convoy.model.backends.cuda.memory.synthetic_weights import draw_into
from convoy.model.backends.cuda.options import BFLOAT16
from convoy.model.checkpoints.checkpoint import map_tensor
from convoy.model.checkpoints.read_tensor import read_kept, unpack_into
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.synthetic import draw_tensor, drawn_key
from convoy.model.checkpoints.tied import check_tied
from convoy.model.kernels.stored.matrix import StoredMatrix
from convoy.model.kernels.stored.weights import Stored
from convoy.model.quantize.parts import matrix_parts, require_rounded
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.registry import FAMILIES
from convoy.wire.messages.control import StageAssignment

if TYPE_CHECKING:
    from convoy.model.checkpoints.slices import Slices

DTYPE = torch.bfloat16
_ACTIVATIONS = frozenset({"silu", "swish"})

LoadProgress = Callable[[int, int], None]


@dataclass(frozen=True)
class DeviceLayerWeights:
    """Hold one decoder layer. ``qkv`` stacks q, k and v, ``gate_up`` stacks gate and up."""

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    head_norms: torch.Tensor | None  # [2, head_dim]: for q and for k
    out: Matrix
    out_bias: torch.Tensor | None
    middle_norm: torch.Tensor
    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """Return the layer's linears."""
        return self.qkv, self.out, self.gate_up, self.down

    def tensors(self) -> list[torch.Tensor]:
        """Return all tensors of the layer."""
        found = [getattr(self, field.name) for field in fields(self)]
        return [tensor for part in found for tensor in tensors_of(part)]


@dataclass
class StageWeights:
    """Hold a stage's weights. Parts that the stage does not own are None."""

    # By their number in the whole model.
    layers: dict[int, DeviceLayerWeights]
    embedding: torch.Tensor | None
    norm: torch.Tensor | None
    # `lm_head`. With tied embeddings it is the embedding itself.
    head: Matrix | None
    eps: float
    bytes_read: int

    @property
    def weight_bytes(self) -> int:
        """Return the resident bytes. A tied matrix counts once."""
        ends = [tensor for part in (self.embedding, self.norm, self.head) for tensor in tensors_of(part)]
        held = [tensor for layer in self.layers.values() for tensor in layer.tensors()] + ends
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())


def tensors_of(part: Matrix | None) -> list[torch.Tensor]:
    """Return the tensors that hold ``part``: codes and scales of a matrix in a form, none for None."""
    if isinstance(part, DeviceMatrix):
        return part.tensors()
    return [] if part is None else [part]


def load_weights(
    source: ModelSource,
    assignment: StageAssignment,
    device: torch.device,
    progress: LoadProgress | None,
    kept: StageWeights | None = None,
    form: KernelForm = BFLOAT16,
    slices: Slices | None = None,
) -> StageWeights:
    """Read or draw only the tensors of the assignment. Layers in ``kept`` are used again.

    Linears are rounded to the bits of ``form``, as `convoy quantize` rounds them, or to floats of 8 bits;
    without bits they stay as they are. ``slices`` selects one rank's part of each
    tensor; None takes all of it.

    The model must be one for which `why_not_ours` returns None. Raises ModelError for a span outside the
    model, and for missing, misshapen or unreadable tensors.
    """
    spec = source.spec
    if not 0 <= assignment.start <= assignment.end <= spec.num_layers:
        raise ModelError(
            f"{source.name} has layers 0 to {spec.num_layers - 1}, "
            f"asked for {assignment.start} to {assignment.end - 1}"
        )
    if form.bits and not form.floats:
        require_rounded(source, form.bits)
    reader = ConfigReader(source.config, source.name)
    loader = _Loader(source, device, progress, assignment, form, slices)
    layers = {} if kept is None else dict(kept.layers)
    for layer in range(assignment.start, assignment.end):
        if layer not in layers:
            layers[layer] = loader.layer(f"model.layers.{layer}.")
    layers = {layer: layers[layer] for layer in range(assignment.start, assignment.end)}
    tied = spec.tied_embeddings
    embedding = loader.whole("model.embed_tokens.weight") if assignment.embed else None
    norm, head = None, None
    if assignment.output:
        check_tied(source)
        norm = loader.whole("model.norm.weight")
        head = loader.head(embedding if tied else None, tied=tied)
    eps = reader.get("rms_norm_eps")
    return StageWeights(
        *(layers, embedding, norm, head),
        eps=float(eps) if isinstance(eps, int | float) else 1e-6,
        bytes_read=loader.bytes_read,
    )


def why_not_ours(source: ModelSource) -> str | None:
    """Return why `cuda.decoder` does not run this model, or None where it does.

    The library's layers run the other models.
    """
    spec = source.spec
    if not FAMILIES[spec.family].plain_layers:
        return f"model type {spec.family!r} has other layers"
    activation = ConfigReader(source.config, source.name).word("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        return f"the activation is {activation!r}"
    carried = all(group.is_carried for group in spec.cache_groups)
    return None if carried else "K and V differ in width"


class _Loader:
    """Fill tensors on the device and report progress."""

    def __init__(
        self,
        source: ModelSource,
        device: torch.device,
        progress: LoadProgress | None,
        assignment: StageAssignment,
        form: KernelForm,
        slices: Slices | None,
    ) -> None:
        self._source = source
        self._slices = slices
        self._device = device
        self._form = form
        self._progress = progress
        wanted = [f"model.layers.{layer}." for layer in range(assignment.start, assignment.end)]
        wanted += ["model.embed_tokens."] if assignment.embed else []
        wanted += ["model.norm.", "lm_head."] if assignment.output else []
        owned = (t for name, t in source.tensors.items() if name.startswith(tuple(wanted)))
        self._total = sum(stored.num_bytes for stored in owned)
        self.bytes_read = 0

    def layer(self, prefix: str) -> DeviceLayerWeights:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        qkv = [f"{attention}{name}_proj" for name in "qkv"]
        gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
        norms = [f"{attention}q_norm.weight", f"{attention}k_norm.weight"]
        head_norms = self._joined(norms) if norms[0] in self._source.tensors else None
        return DeviceLayerWeights(
            input_norm=self.whole(f"{prefix}input_layernorm.weight"),
            qkv=self._matrix([f"{name}.weight" for name in qkv]),
            qkv_bias=self._biases(qkv),
            head_norms=None if head_norms is None else head_norms.view(2, -1),
            out=self._matrix([f"{attention}o_proj.weight"]),
            out_bias=self._biases([f"{attention}o_proj"]),
            middle_norm=self.whole(f"{prefix}post_attention_layernorm.weight"),
            gate_up=self._matrix([f"{name}.weight" for name in gate_up]),
            gate_up_bias=self._biases(gate_up),
            down=self._matrix([f"{mlp}down_proj.weight"]),
            down_bias=self._biases([f"{mlp}down_proj"]),
        )

    def whole(self, name: str) -> torch.Tensor:
        return self._joined([name])

    def head(self, embedding: torch.Tensor | None, *, tied: bool) -> Matrix:
        """Return `lm_head`, which may be the ``embedding``."""
        if tied:
            return self.whole("model.embed_tokens.weight") if embedding is None else embedding
        # Tokens that are nearly as likely change places with little rounding.
        return self.whole("lm_head.weight") if self._form.floats else self._matrix(["lm_head.weight"])

    def _matrix(self, names: list[str]) -> Matrix:
        """Return the named matrices, one below the other, in the form in which they stay."""
        found: list[DeviceMatrix] = []
        for name in names:
            one = self._held(name)
            if one is None:
                # Joined matrices are multiplied as one, so all are unpacked if one is.
                return self._joined(names)
            found.append(one)
        ranges = [one for matrix in found for one in matrix.ranges]
        return DeviceMatrix.joined(ranges, rounds_rows=self._form.floats)

    def _held(self, name: str) -> DeviceMatrix | None:
        """Return a matrix in codes and scales, or None for one that is unpacked."""
        if self._form.floats:
            return self._as_float8(name)
        return self._rounded(name) if self._form.bits else self._kept(name)

    def _kept(self, name: str) -> DeviceMatrix | None:
        """Return a matrix in the form of its file, or None where the card has no layout for it."""
        whole = self._source.layout.made.get(name)
        if whole is None or not whole.kept_bytes:
            return None
        stored = read_kept(self._source, name)
        stored = stored if self._slices is None else self._slices.take(name, stored)
        if not isinstance(stored, StoredMatrix) or not has_layout(stored):
            return None
        self._count(sum(part.num_bytes for part in whole.parts.values()))
        return pack_matrix(stored, self._device)

    def _as_float8(self, name: str) -> DeviceMatrix | None:
        """Return a matrix rounded to floats of 8 bits, or None if products do not take its shape.

        Floats of a file with one scale for an output stay as they are.
        """
        if not fits_float8(*self._shape(name)):
            return None
        made = self._source.layout.made.get(name)
        if made is not None and made.kept_form == "F8_E4M3" and not made.kept_group:
            kept = self._kept(name)
            if kept is not None:
                (one,) = kept.ranges
                return of_float8(one.codes, one.scales)
        described = self._source.layout.made.get(name) or self._source.tensors[name]
        whole = torch.empty(described.shape, dtype=DTYPE, device=self._device)
        self._fill_whole(whole, name)
        (one,) = round_to_float8(whole, f"{self._source.name}: {name}").ranges
        if self._slices is None:
            return of_float8(one.codes, one.scales)
        # Scales are those of whole outputs, so that ranks have the numbers of one device.
        every = one.scales.expand(-1, described.shape[1])
        return of_float8(self._slices.take(name, one.codes), self._slices.take(name, every)[:, :1])

    def _rounded(self, name: str) -> DeviceMatrix | None:
        """Return a matrix rounded on the device, or None for one that stays as it is."""
        described = self._source.layout.made.get(name) or self._source.tensors.get(name)
        if described is None:
            return None
        (part,) = matrix_parts(self._source, name, described.shape, self._form.bits)
        if not part.bits:
            return None
        made = self._source.layout.made.get(name)
        # Values are those of the reader, which other members round too.
        dtype = torch.float32 if made is None else getattr(torch, made.dtype)
        whole = torch.empty(described.shape, dtype=dtype, device=self._device)
        self._fill_whole(whole, name)
        rounded: Stored = round_on_device(whole, part.bits, f"{self._source.name}: {name}")
        rounded = rounded if self._slices is None else self._slices.take(name, rounded)
        assert isinstance(rounded, StoredMatrix)
        return pack_matrix(rounded, self._device)

    def _biases(self, linears: list[str]) -> torch.Tensor | None:
        names = [f"{name}.bias" for name in linears]
        return self._joined(names) if names[0] in self._source.tensors else None

    def _joined(self, names: list[str]) -> torch.Tensor:
        """Return the named tensors, stacked along the first dimension."""
        shapes = [self._shape(name) for name in names]
        if len({shape[1:] for shape in shapes}) > 1:
            listed = ", ".join(str(list(shape)) for shape in shapes)
            raise ModelError(f"{self._source.name}: {names[0]} and its like have the shapes {listed}")
        num_rows = sum(shape[0] for shape in shapes)
        whole = torch.empty(num_rows, *shapes[0][1:], dtype=DTYPE, device=self._device)
        done = 0
        for name, shape in zip(names, shapes, strict=True):
            self._fill(whole[done : done + shape[0]], name)
            done += shape[0]
        return whole

    def _shape(self, name: str) -> tuple[int, ...]:
        described = self._source.layout.made.get(name) or self._source.tensors.get(name)
        if described is None:
            raise ModelError(
                f"{self._source.name}: the checkpoint has no tensor {name}",
                hint="a shard is missing or the directory is of another model",
            )
        if self._slices is None:
            return described.shape
        return tuple(self._slices.take(name, torch.empty(described.shape, device="meta")).shape)

    def _fill(self, target: torch.Tensor, name: str) -> None:
        if self._slices is None:
            self._fill_whole(target, name)
            return
        stored = self._source.layout.made.get(name) or self._source.tensors[name]
        # Drawing and unpacking give a whole tensor, so it exists in full until its slice is copied.
        whole = torch.empty(stored.shape, dtype=DTYPE, device=self._device)
        self._fill_whole(whole, name)
        target.copy_(self._slices.take(name, whole))

    def _fill_whole(self, target: torch.Tensor, name: str) -> None:
        whole = self._source.layout.made.get(name)
        if whole is None:
            self._fill_plain(target, name)
        else:
            unpack_into(target, self._source, name)
            self._count(sum(part.num_bytes for part in whole.parts.values()))

    def _fill_plain(self, target: torch.Tensor, name: str) -> None:
        seed, stored = self._source.seed, self._source.tensors[name]
        if seed is None:
            target.copy_(map_tensor(stored))
        elif len(stored.shape) == 2:
            draw_into(target, drawn_key(stored, seed), math.sqrt(3 / stored.shape[1]) / 2**31)
        else:
            target.copy_(draw_tensor(stored, seed))
        self._count(stored.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.bytes_read += num_bytes
        if self._progress is not None:
            self._progress(self.bytes_read, self._total)
