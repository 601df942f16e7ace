"""Read a stage's tensors into MLX arrays, and keep the codes of quantised matrices as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import mlx.core as mx

from convoy.errors import ModelError
from convoy.model.backends.mlx.arrays import DTYPES, to_mlx
from convoy.model.backends.mlx.rotation import KINDS, rope_kind
from convoy.model.checkpoints.checkpoint import map_tensor
from convoy.model.checkpoints.formats.mlx import AffineRows
from convoy.model.checkpoints.formats.mxfp4 import RowFloats
from convoy.model.checkpoints.formats.unpacking import Unpacking
from convoy.model.checkpoints.names import decoder_name
from convoy.model.checkpoints.owned import owned_tensors
from convoy.model.checkpoints.read_tensor import read_tensor
from convoy.model.checkpoints.source import ModelSource
from convoy.model.checkpoints.tied import check_tied
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.registry import FAMILIES
from convoy.wire.messages.control import StageAssignment

LoadProgress = Callable[[int, int], None]

_ACTIVATIONS = frozenset({"silu", "swish"})
# The groups that `quantized_matmul` takes.
_GROUPS = (32, 64, 128)
_ON_CPU = 'set device = "cpu" for this member: its exact mode runs this model'


@dataclass(frozen=True)
class CodedMatrix:
    """Hold a quantised matrix of [outputs, inputs] as `mx.quantize` lays it out."""

    codes: mx.array
    scales: mx.array
    # None in modes without a least value.
    biases: mx.array | None
    group_size: int
    bits: int
    mode: str

    def multiply(self, x: mx.array) -> mx.array:
        """Return ``x`` [rows, inputs] times the matrix, in the dtype of ``x``."""
        found = mx.quantized_matmul(
            x,
            self.codes,
            self.scales,
            self.biases,
            transpose=True,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )
        return found.astype(x.dtype)

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the rows of ``tokens`` without codes."""
        biases = None if self.biases is None else self.biases[tokens]
        return mx.dequantize(
            self.codes[tokens],
            self.scales[tokens],
            biases,
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
        )

    @property
    def arrays(self) -> list[mx.array]:
        return [self.codes, self.scales, *(() if self.biases is None else (self.biases,))]


@dataclass(frozen=True)
class PlainMatrix:
    """Hold a matrix of [outputs, inputs] in the dtype of the activations."""

    weight: mx.array

    def multiply(self, x: mx.array) -> mx.array:
        """Return ``x`` [rows, inputs] times the matrix."""
        return x @ self.weight.T

    def rows(self, tokens: mx.array) -> mx.array:
        """Return the rows of ``tokens``."""
        return self.weight[tokens]

    @property
    def arrays(self) -> list[mx.array]:
        return [self.weight]


Matrix = CodedMatrix | PlainMatrix


@dataclass(frozen=True)
class Linear:
    """Hold a matrix and its bias, if it has one."""

    matrix: Matrix
    bias: mx.array | None

    def __call__(self, x: mx.array) -> mx.array:
        found = self.matrix.multiply(x)
        return found if self.bias is None else found + self.bias

    @property
    def arrays(self) -> list[mx.array]:
        return self.matrix.arrays + ([] if self.bias is None else [self.bias])


@dataclass(frozen=True)
class MlxLayerWeights:
    """Hold one decoder layer: attention and a gated MLP, with a norm before either."""

    input_norm: mx.array
    q: Linear
    k: Linear
    v: Linear
    # Of each head's query and key.
    q_norm: mx.array | None
    k_norm: mx.array | None
    out: Linear
    middle_norm: mx.array
    gate: Linear
    up: Linear
    down: Linear

    @property
    def arrays(self) -> list[mx.array]:
        found: list[mx.array] = []
        for field in fields(self):
            part = getattr(self, field.name)
            found += part.arrays if isinstance(part, Linear) else [] if part is None else [part]
        return found


@dataclass
class MlxWeights:
    """Hold a stage's weights. Parts that the stage does not own are None."""

    layers: dict[int, MlxLayerWeights]
    embedding: Matrix | None
    norm: mx.array | None
    head: Matrix | None
    eps: float
    bytes_read: int

    @property
    def num_bytes(self) -> int:
        """Return the resident bytes. A tied matrix that is stored once counts once."""
        held = [array for layer in self.layers.values() for array in layer.arrays]
        for part in (self.embedding, None if self.head is self.embedding else self.head):
            held += [] if part is None else part.arrays
        norm_bytes = 0 if self.norm is None else int(self.norm.nbytes)
        return sum(int(array.nbytes) for array in held) + norm_bytes


def check_supported(source: ModelSource) -> None:
    """Raise ModelError, naming the part, for a model that no stage on MLX runs. Reads no weights."""
    if reason := why_not(source):
        raise ModelError(f"{source.name} does not run on mlx: {reason}", hint=_ON_CPU)


def why_not(source: ModelSource) -> str:
    """Return what no stage on MLX runs of this model, or ""."""
    spec = source.spec
    if not FAMILIES[spec.family].plain_layers:
        known = ", ".join(sorted(name for name, row in FAMILIES.items() if row.plain_layers))
        return f"model type {spec.family} has other layers than {known}"
    activation = ConfigReader(source.config, source.name).word("hidden_act") or "silu"
    if activation not in _ACTIVATIONS:
        return f"the activation is {activation}, expected silu"
    if not all(group.is_carried for group in spec.cache_groups):
        return "K and V differ in width"
    if rope_kind(source) not in KINDS:
        return f"its rotation is {rope_kind(source)}, expected {', '.join(KINDS)}"
    reasons = (_why_not_form(name, whole) for name, whole in source.layout.made.items())
    return next((reason for reason in reasons if reason), "")


def _why_not_form(name: str, whole: Unpacking) -> str:
    """Return why `quantized_matmul` does not take a stored tensor, or ""."""
    if isinstance(whole, RowFloats):
        return ""
    if not isinstance(whole, AffineRows):
        kind = type(whole).__name__
        return f"{name} is stored in a form ({kind}) that quantized_matmul does not take"
    if whole.group_size not in _GROUPS:
        return f"{name} has groups of {whole.group_size}, expected {', '.join(map(str, _GROUPS))}"
    return ""


def load_weights(
    source: ModelSource,
    assignment: StageAssignment,
    dtype: str,
    progress: LoadProgress | None = None,
    kept: MlxWeights | None = None,
) -> MlxWeights:
    """Read only the tensors of the assignment. Layers in ``kept`` are used again.

    Raises ModelError for a span outside the model, and for missing or unreadable tensors.
    """
    num_layers = source.spec.num_layers
    if not 0 <= assignment.start <= assignment.end <= num_layers:
        raise ModelError(
            f"{source.name} has layers 0 to {num_layers - 1}, "
            f"asked for {assignment.start} to {assignment.end - 1}"
        )
    if assignment.output:
        check_tied(source)
    old = {} if kept is None else kept.layers
    wanted = range(assignment.start, assignment.end)
    loader = _Loader(source, assignment, dtype, progress, [layer for layer in wanted if layer not in old])
    layers = {layer: old[layer] if layer in old else loader.layer(layer) for layer in wanted}
    embedding = loader.matrix("model.embed_tokens") if assignment.embed else None
    norm, head = None, None
    if assignment.output:
        norm = loader.plain("model.norm.weight")
        tied = source.spec.tied_embeddings
        own = "model.embed_tokens" if tied else "lm_head"
        head = embedding if tied and embedding is not None else loader.matrix(own)
    eps = ConfigReader(source.config, source.name).get("rms_norm_eps")
    eps = float(eps) if isinstance(eps, int | float) else 1e-6
    return MlxWeights(layers, embedding, norm, head, eps, loader.bytes_read)


class _Loader:
    """Copy tensors one by one, and report the progress."""

    def __init__(
        self,
        source: ModelSource,
        assignment: StageAssignment,
        dtype: str,
        progress: LoadProgress | None,
        layers: list[int],
    ) -> None:
        self._source = source
        self._dtype = DTYPES[dtype]
        self._progress = progress
        # A file's names by those in the decoder: some files hold more than text.
        made = source.layout.made
        self._names = {decoder_name(name): name for name in (*source.tensors, *made)}
        owned = owned_tensors(source, layers, embed=assignment.embed, output=assignment.output)
        self._total = sum(stored.num_bytes for stored in owned)
        self.bytes_read = 0

    def layer(self, number: int) -> MlxLayerWeights:
        prefix = f"model.layers.{number}."
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return MlxLayerWeights(
            input_norm=self.plain(f"{prefix}input_layernorm.weight"),
            q=self._linear(f"{attention}q_proj"),
            k=self._linear(f"{attention}k_proj"),
            v=self._linear(f"{attention}v_proj"),
            q_norm=self._optional(f"{attention}q_norm.weight"),
            k_norm=self._optional(f"{attention}k_norm.weight"),
            out=self._linear(f"{attention}o_proj"),
            middle_norm=self.plain(f"{prefix}post_attention_layernorm.weight"),
            gate=self._linear(f"{mlp}gate_proj"),
            up=self._linear(f"{mlp}up_proj"),
            down=self._linear(f"{mlp}down_proj"),
        )

    def plain(self, name: str) -> mx.array:
        """Return a tensor in the dtype of the activations."""
        stored = self._names.get(name)
        if stored is None:
            raise ModelError(
                f"{self._source.name}: the checkpoint has no tensor {name}",
                hint="a shard is missing or the directory is of another model",
            )
        found = to_mlx(read_tensor(self._source, stored), self._dtype)
        whole = self._source.layout.made.get(stored)
        parts = [self._source.tensors[stored]] if whole is None else whole.parts.values()
        self._count([found], sum(part.num_bytes for part in parts))
        return found

    def matrix(self, module: str) -> Matrix:
        """Return the matrix of ``module``, with its codes if it has any."""
        name = f"{module}.weight"
        whole = self._source.layout.made.get(self._names.get(name, ""))
        # Embeddings are rounded to the dtype of their scales, so codes do not tell their float32 values.
        if whole is None or (self._dtype == mx.float32 and whole.dtype != "float32"):
            return PlainMatrix(self.plain(name))
        parts = {role: to_mlx(map_tensor(part)) for role, part in whole.parts.items()}
        if isinstance(whole, AffineRows):
            scales, biases = (self._scale(parts[role]) for role in ("scales", "biases"))
            found = CodedMatrix(parts["weight"], scales, biases, whole.group_size, whole.bits, "affine")
        else:
            assert isinstance(whole, RowFloats), "`check_supported` was not asked"
            codes, scales = parts["weight"], parts["scales"]
            codes = codes if codes.dtype == mx.uint32 else codes.view(mx.uint32)
            found = CodedMatrix(codes, scales.view(mx.uint8), None, 32, 4, "mxfp4")
        self._count(found.arrays, sum(part.num_bytes for part in whole.parts.values()))
        return found

    def _scale(self, stored: mx.array) -> mx.array:
        """Return scales so that no product rounds them, and none converts them if that can be avoided."""
        return stored.astype(mx.float32) if self._dtype == mx.float32 else stored

    def _linear(self, module: str) -> Linear:
        return Linear(self.matrix(module), self._optional(f"{module}.bias"))

    def _optional(self, name: str) -> mx.array | None:
        return self.plain(name) if name in self._names else None

    def _count(self, arrays: list[mx.array], num_bytes: int) -> None:
        # Evaluated at once, so that only one tensor exists twice.
        mx.eval(*arrays)
        self.bytes_read += num_bytes
        if self._progress is not None:
            self._progress(self.bytes_read, self._total)
