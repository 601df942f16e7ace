"""Read a stage's tensors into MLX arrays, and keep the codes of quantised matrices as they are stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import mlx.core as mx

from convoy.errors import ModelError
from convoy.model.backends.mlx.arrays import DTYPES, to_mlx
from convoy.model.backends.mlx.matrices import CodedMatrix, Experts, GatedMlp, Linear, Matrix, PlainMatrix
from convoy.model.backends.mlx.rotation import KINDS, rope_kind
from convoy.model.checkpoints.checkpoint import map_tensor
from convoy.model.checkpoints.formats.mlx import AffineRows
from convoy.model.checkpoints.formats.mxfp4 import RowFloats
from convoy.model.checkpoints.formats.unpacking import JoinedRows, Unpacking
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
# As in `transformers`, where config.json does not say it.
_DEFAULT_CHOSEN = 8
_PARTS = ("gate", "up", "down")
_ON_CPU = 'set device = "cpu" for this member: its exact mode runs this model'


@dataclass(frozen=True)
class MlxLayerWeights:
    """Hold one decoder layer: attention, and a gated MLP or experts, with a norm before either."""

    input_norm: mx.array
    q: Linear
    k: Linear
    v: Linear
    # Of each head's query and key.
    q_norm: mx.array | None
    k_norm: mx.array | None
    out: Linear
    middle_norm: mx.array
    feed_forward: GatedMlp | Experts

    @property
    def arrays(self) -> list[mx.array]:
        found: list[mx.array] = []
        for field in fields(self):
            part = getattr(self, field.name)
            if part is not None:
                found += [part] if isinstance(part, mx.array) else part.arrays
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
    runs = {name for name, row in FAMILIES.items() if row.plain_layers or row.plain_experts}
    if spec.family not in runs:
        known = ", ".join(sorted(runs))
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
    # mlx-lm's two stacks of experts, which are one in `transformers`.
    if isinstance(whole, JoinedRows) and len(whole.shape) == 3:
        return next((reason for one in whole.wholes if (reason := _why_not_form(name, one))), "")
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
        attention = f"{prefix}self_attn."
        return MlxLayerWeights(
            input_norm=self.plain(f"{prefix}input_layernorm.weight"),
            q=self._linear(f"{attention}q_proj"),
            k=self._linear(f"{attention}k_proj"),
            v=self._linear(f"{attention}v_proj"),
            q_norm=self._optional(f"{attention}q_norm.weight"),
            k_norm=self._optional(f"{attention}k_norm.weight"),
            out=self._linear(f"{attention}o_proj"),
            middle_norm=self.plain(f"{prefix}post_attention_layernorm.weight"),
            feed_forward=self._feed_forward(f"{prefix}mlp."),
        )

    def _feed_forward(self, prefix: str) -> GatedMlp | Experts:
        """Return experts in the layers whose file has a router."""
        if f"{prefix}gate.weight" not in self._names:
            gate, up, down = (self._linear(f"{prefix}{part}_proj") for part in _PARTS)
            return GatedMlp(gate, up, down)
        reader = ConfigReader(self._source.config, self._source.name)
        router = self._linear(f"{prefix}gate")
        num_experts = router.matrix.arrays[0].shape[0]
        num_chosen = reader.count("num_experts_per_tok", most=num_experts, default=_DEFAULT_CHOSEN)
        gates, ups, downs = self._stacks(f"{prefix}experts.")
        return Experts(router, gates, ups, downs, num_chosen, reader.flag("norm_topk_prob"))

    def _stacks(self, prefix: str) -> tuple[Matrix, Matrix, Matrix]:
        """Return the stacks of gates, ups and downs, whether the file has stacks or single experts."""
        if f"{prefix}gate_up_proj" not in self._names:
            gate, up, down = (self._stack(prefix, part) for part in _PARTS)
            return gate, up, down
        joined = self._source.layout.made.get(self._names[f"{prefix}gate_up_proj"])
        if isinstance(joined, JoinedRows):
            gate, up = (self._coded(whole) for whole in joined.wholes)
        else:
            gate, up = (PlainMatrix(half) for half in self.plain(f"{prefix}gate_up_proj").split(2, axis=1))
        whole = self._source.layout.made.get(self._names.get(f"{prefix}down_proj", ""))
        down = PlainMatrix(self.plain(f"{prefix}down_proj")) if whole is None else self._coded(whole)
        return gate, up, down

    def _stack(self, prefix: str, part: str) -> Matrix:
        """Return the matrices ``part`` of all single experts. Raises ModelError if their forms differ."""
        found: list[Matrix] = []
        while not found or f"{prefix}{len(found)}.{part}_proj.weight" in self._names:
            found.append(self.matrix(f"{prefix}{len(found)}.{part}_proj"))
        if len({(type(one), *(array.shape for array in one.arrays)) for one in found}) > 1:
            raise ModelError(f"{self._source.name}: {prefix}*.{part}_proj differ in form", hint=_ON_CPU)
        arrays = [mx.stack(list(own)) for own in zip(*(one.arrays for one in found), strict=True)]
        # One stack at a time exists twice.
        mx.eval(*arrays)
        first = found[0]
        if isinstance(first, PlainMatrix):
            return PlainMatrix(arrays[0])
        codes, scales, *biases = arrays
        return replace(first, codes=codes, scales=scales, biases=biases[0] if biases else None)

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
        return self._coded(whole)

    def _coded(self, whole: Unpacking) -> CodedMatrix:
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
