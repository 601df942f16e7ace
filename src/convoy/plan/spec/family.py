"""The parts of a model's row: the heads of a layer, its hidden states, and the family that reads them.

`plan.spec.families` has one module for each family. Each row was read from the family's configuration and
modelling code in `transformers`, defaults included: a missing key must mean the same to the plan as to the
loader. Every default here is a Llama's, so a plain family sets little. The rows are data without torch.
`model.layers` and `model.loading` read the same row for a layer's exact parts and for its fast path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from convoy.plan.spec.cache import STATE_TILE, CacheKind
from convoy.plan.spec.compressed import Compression
from convoy.plan.spec.config import ConfigReader

MAX_LAYERS = 1024
# Hidden, intermediate and attention widths.
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 22
MAX_CONTEXT = 1 << 27
MAX_EXPERTS = 1 << 14
# Hidden states of a token.
MAX_STREAMS = 64

Shape = tuple[int, ...]
# Names and shapes of weights.
Tensors = Iterator[tuple[str, Shape]]
# The norm of a family: its row divided by the root mean square, times the weight, or times one plus it. None:
# another norm, which the library computes.
NormKind = Literal["weight", "one plus weight"]
# How a router weighs experts: by a softmax over all of them or over the chosen ones, or by sigmoids, with
# experts of the best groups.
RouterKind = Literal["softmax of all", "softmax of chosen", "best groups"]
# Which dimensions of a head turn together: each with the one half the rotary part behind, or neighbours. The
# factors of neighbours are those of the first half, or stand in pairs themselves.
RotationKind = Literal["halves", "pairs", "pairs apart"]
# How tensors of a GGUF file make one of the library's, by a word of `formats.arrange`.
Arrangement = Literal[
    "as stored",
    "less one",
    "one row",
    "joined",
    "transposed",
    "alternating",
    "alternating columns",
    "latents",
    "value rows",
    "values behind keys",
    "value heads",
    "value columns",
    "decays",
    "taps",
]
# How an expert applies its gate: the model's activation, or GPT-OSS's or DeepSeek V4's with bounds.
GateKind = Literal["activation", "clamped", "limited"]


@dataclass(frozen=True)
class LayerHeads:
    """Describe the attention of one layer."""

    num_heads: int
    num_kv_heads: int
    # Of queries and keys.
    head_dim: int
    value_dim: int
    # Tokens that it looks back on, its own included; None: all of them.
    window: int | None = None
    # The layer that it reads K and V of; None: it has its own.
    kv_source: int | None = None
    kind: CacheKind = "kv"
    # Of a delta net, where heads are those of keys and values.
    num_taps: int = 0
    # Of the tokens behind the window.
    compression: Compression | None = None

    @property
    def is_state(self) -> bool:
        """Return whether a layer keeps one state of a sequence, and no keys."""
        return self.kind == "recurrent"

    @property
    def mixed_width(self) -> int:
        """Return the width of a delta net's convolution: queries, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim + self.num_heads * self.value_dim

    @property
    def state_elements(self) -> int:
        """Return the elements that a delta net keeps of a sequence, as `model.kv.delta_batch` lays them out.

        For attention it is 0.
        """
        if not self.is_state:
            return 0
        past = (self.num_taps - 1) * self.mixed_width
        state = self.num_heads * self.head_dim * self.value_dim
        kept = self.num_kv_heads * self.head_dim + self.num_heads * (self.value_dim + 2)
        return past + state + STATE_TILE * kept


@dataclass(frozen=True)
class Streams:
    """Count the hidden states of a token between layers, and the weights that several of them need.

    ``joining_elements`` counts the weights that join them before the output. ``hashed`` lists the layers with
    a table of the experts for each token id.
    """

    num: int = 1
    joining_elements: int = 0
    hashed: frozenset[int] = frozenset()
    table_elements: int = 0

    def table_of(self, layer: int) -> int:
        """Return the elements of a layer's table."""
        return self.table_elements if layer in self.hashed else 0


@dataclass(frozen=True)
class GgufTensor:
    """Name the tensors of a GGUF file that make one of the library's, behind the layer's prefix."""

    arrangement: Arrangement
    stored: tuple[str, ...]


# Returns keys of config.json from a file's settings, whose names begin behind the architecture's. The last
# argument has the shapes of the file's tensors, by the file's names.
ReadGguf = Callable[["ConfigReader", Mapping[str, Shape]], Mapping[str, object]]


@dataclass(frozen=True)
class GgufForm:
    """Describe how llama.cpp's converter names and changes a family's settings and tensors.

    `formats.gguf` has the names that all families share.
    """

    # The file's general.architecture.
    architecture: str
    # Whether files of this architecture have experts, where another family has the same architecture.
    experts: bool = False
    # Settings and their keys in config.json.
    settings: Mapping[str, str] = field(default_factory=dict)
    # Keys of config.json that no file has.
    fixed: Mapping[str, object] = field(default_factory=dict)
    # Returns the keys that need more than a new name.
    read: ReadGguf | None = None
    # Modules of a layer and their names in the library; "": the file has none of that name.
    modules: Mapping[str, str] = field(default_factory=dict)
    # The library's tensors of a layer that need more than a new name.
    made: Mapping[str, GgufTensor] = field(default_factory=dict)
    # Tensors outside layers.
    ends: Mapping[str, str] = field(default_factory=dict)
    # The linears whose rows have another order, and the keys with their numbers of heads.
    turned: Mapping[str, str] = field(default_factory=dict)
    # Whether norms hold one plus the weight, and the modules of norms that do not.
    norms_plus_one: bool = False
    plain_norms: frozenset[str] = frozenset()
    # Whether a part of a head may be rotated.
    partial_rotation: bool = False
    # Keys of a rotation of the type yarn that no file has.
    yarn: Mapping[str, object] = field(default_factory=dict)
    # Whether the keys of the rotation come from ``read``.
    own_rotation: bool = False


@dataclass(frozen=True)
class LayerForm:
    """Describe a layer to compiled code, as far as its modules do not show it.

    Such a layer is attention and then an MLP or experts, with norms around them and a residual sum behind
    either, and no more. `model.backends.host.native_layers` runs it.
    """

    # The norms before and behind attention, and before and behind the MLP; "": there is none.
    norms: tuple[str, str, str, str] = ("input_layernorm", "", "post_attention_layernorm", "")
    # Whether norms subtract the mean, and divide by the deviation from it.
    mean_norms: bool = False
    # Whether the MLP reads what attention reads, and not what attention adds to.
    parallel: bool = False
    # How heads turn, where `Family.plain_attention` is false.
    rotation: RotationKind = "halves"
    # Whether heads turn in layers with a window alone.
    full_unturned: bool = False


@dataclass(frozen=True)
class MlxForm:
    """Describe layers to `model.backends.mlx`, as far as other fields and the tensors do not show them."""

    # Whether embeddings are multiplied by the root of the hidden width.
    scaled_embeddings: bool = False
    # The key of the number whose root divides queries; "": it is the width of a head.
    query_scale_key: str = ""
    # Whether values have a norm without a weight, and queries are not divided.
    value_norms: bool = False


# The names of four norms, as Gemma's layers have them.
FOUR_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


# Experts as most families' converters stack them.
GGUF_EXPERTS: Mapping[str, GgufTensor] = {
    "mlp.experts.gate_up_proj": GgufTensor("joined", ("ffn_gate_exps.weight", "ffn_up_exps.weight")),
    "mlp.experts.down_proj": GgufTensor("as stored", ("ffn_down_exps.weight",)),
}
GGUF_CHOICE: Mapping[str, str] = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}


ReadHeads = Callable[["ConfigReader", "Family", int, int], tuple[LayerHeads, ...]]
ListAttention = Callable[["ConfigReader", "Family", LayerHeads, int], Tensors]
ListFeedForward = Callable[["ConfigReader", "Family", int, LayerHeads, int], Tensors]
ReadStreams = Callable[["ConfigReader", int, int], Streams]


@dataclass(frozen=True)
class Family:
    """Describe the differences between one family of decoders and the next."""

    model_type: str
    # The values of keys that are not written.
    defaults: Mapping[str, object] = field(default_factory=dict)
    # Reads the heads of all layers; None: `heads.alike_heads`.
    heads: ReadHeads | None = None
    # Lists the weights of a layer's attention; None: `tensors.attention`.
    attention: ListAttention | None = None
    # Lists the weights of a layer's MLP or experts; None: `tensors.mlp`.
    feed_forward: ListFeedForward | None = None
    # Reads the hidden states between layers; None: there is one.
    streams: ReadStreams | None = None
    # "joined": one linear for q, k and v.
    qkv: str = "apart"
    # None: the key attention_bias decides.
    qkv_bias: bool | None = False
    # Whether attention_bias applies to o_proj too.
    out_bias: bool = False
    # RMS norms over each head's query and key.
    qk_norm: bool = False
    # Whether the query's linear also makes a gate for attention's result.
    gated: bool = False
    # Whether some layers keep recurrent state, so that a sequence cannot rewind.
    recurrent: bool = False
    # A logit of each query head that takes part in the softmax and has no value.
    sinks: bool = False
    # The layers with a sliding window: "always", "if used", "after a layer" or "by layer type".
    window: str | None = None
    # Without layer_types, every layer with a multiple of this number looks back on everything.
    full_every: int = 0
    # The key that may override full_every.
    full_every_key: str = ""
    # Whether the loader makes the last layer a full one in any case.
    ends_full: bool = False
    # "joined": one linear for gate and up.
    mlp: str = "gated"
    # Whether the key mlp_bias counts.
    mlp_bias: bool = False
    # 4: also after attention and MLP.
    num_norms: int = 2
    # Whether the loader refuses a hidden_size that the heads do not divide.
    divides_hidden: bool = False
    # Whether a layer's weight is read from the checkpoint's headers.
    counted: bool = False
    # True or set, these keys ask for an option that a stage does not support.
    refused_keys: tuple[str, ...] = ()
    # Whether each layer may have an input of its own beside the hidden state.
    layer_inputs: bool = False
    # The kinds of RoPE scaling that turn every position anew beyond the original context.
    long_ropes: frozenset[str] = frozenset({"longrope"})
    # Why ranks cannot share a layer; "": they can.
    unshared: str = ""
    # Whether the expert for all rows takes its width from the others.
    shared_expert_alike: bool = False
    # The key with the width of an expert.
    expert_width_key: str = "moe_intermediate_size"
    # Whether stacks of experts are [experts, inputs, outputs], with columns of gate and up in turn.
    transposed_experts: bool = False
    # How GGUF files hold the family; None: they are not read.
    gguf: GgufForm | None = None
    # Exact parts. The norms of layers, and the final one.
    norm: NormKind | None = "weight"
    # Whether `exact.ExactAttention` replaces a layer's attention. Such attention has linears for q, k and v,
    # optional norms of each head's q and k, a rotation of the halves of a head's rotary part, optional sinks,
    # and no more.
    plain_attention: bool = False
    router: RouterKind | None = None
    expert_gate: GateKind = "activation"
    # Parts of a layer that modules of ours replace under every kernel: path in the layer -> "module:class".
    # The path "" is the layer.
    replaced: Mapping[str, str] = field(default_factory=dict)
    # Whether a layer is a norm, attention, a norm and a gated MLP, with a residual sum behind either, and
    # no more. `cuda.decoder` runs such layers.
    plain_layers: bool = False
    # How stages on MLX run the layers; None: they do not.
    mlx: MlxForm | None = None
    # The layers' form for compiled code of hosts; None: they run part by part.
    layer_form: LayerForm | None = None
