"""The facts about a model that a plan needs, read from its `config.json` alone: no weights are opened."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from convoy.config.kernels import AUTO, DTYPE_BYTES, KV_FORMS, KvForm, form_of
from convoy.errors import ModelError
from convoy.plan.spec.cache import CacheGroup, dtype_bytes
from convoy.plan.spec.config import ConfigReader
from convoy.plan.spec.family import MAX_LAYERS, MAX_VOCABULARY, MAX_WIDTH, Family, LayerHeads, Shape
from convoy.plan.spec.heads import cache_groups, forbidden_cuts, read_heads
from convoy.plan.spec.registry import read_family
from convoy.plan.spec.rotary import check_rotary, max_context
from convoy.plan.spec.tensors import layer_tensors, per_layer_input, read_streams
from convoy.plan.spec.weights import LayerWeights, layer_weights

# A norm's least divisor by the families' words, and Granite's divisor.
_ABOVE_0 = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "hc_eps", "logits_scaling")
# Of DeepSeek V4's streams, in every layer and step.
_MAX_ROUNDS = 1000
_KV_AUTO = "leave kv_dtype at auto"
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LAYER_TENSOR = re.compile(r"model\.layers\.([0-9]{1,6})\.", re.ASCII)


@dataclass(frozen=True)
class ModelSpec:
    """Hold a model's shape. Byte counts take the dtype in which a stage holds weights, not that on disk."""

    name: str
    # The model_type of config.json, a row of `plan.spec.families`.
    family: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    # In tokens.
    max_context: int
    # The output reuses the embedding matrix, so both owners need it.
    tied_embeddings: bool
    # Of the checkpoint, as config.json claims; "float32" if it does not.
    stored_dtype: str
    layers: tuple[LayerWeights, ...]
    cache_groups: tuple[CacheGroup, ...]
    # Whether rows may overwrite the last positions: recurrent state does not allow it.
    can_rewind: bool = True
    # Hidden states that cross a boundary for each token.
    num_streams: int = 1
    # Weight elements that join the streams into one, at the owner of the output.
    joining_elements: int = 0
    # Layers that need token ids.
    token_id_layers: frozenset[int] = field(default_factory=frozenset)
    # Width of the input that each of these layers makes from token ids.
    layer_input_size: int = 0
    # First layer after the cut -> why not there.
    forbidden_cuts: Mapping[int, str] = field(default_factory=dict)
    # In each layer that has any.
    experts_per_token: int = 0
    # Maps a layer without K/V to the layer that it reads.
    kv_sources: Mapping[int, int] = field(default_factory=dict)
    # Of the embedding and of `lm_head` in the form of the file, for kernels that keep it; 0 for float32.
    kept_embed_bytes: int = 0
    kept_output_bytes: int = 0
    # Of the codes and scales of `lm_head` on a CUDA device; 0 where it is unpacked there.
    card_output_bytes: int = 0
    # Ranks that share a stage; weights and heads are those of one of them (`plan.spec.sharding`).
    num_ranks: int = 1

    @classmethod
    def from_config(
        cls,
        config: Mapping[str, object],
        name: str,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        kept: Mapping[str, int] | None = None,
        on_card: Mapping[str, int] | None = None,
    ) -> ModelSpec:
        """Read a parsed `config.json`; errors call the model ``name``.

        ``shapes`` are those of the checkpoint's tensors, which some families need to know a layer's weight.
        ``kept`` has the bytes of matrices that stages may keep in the form of their file, by name in the
        decoder; all others are held in the kernel's form. ``on_card`` has those of codes and scales on a
        CUDA device.
        Raises ModelError for an unsupported type, and for a missing, absurd or contradictory value.
        """
        reader = ConfigReader(config, name)
        family = read_family(reader)
        reader = reader.with_defaults(family.defaults)
        num_layers = reader.count("num_hidden_layers", most=MAX_LAYERS)
        hidden_size = reader.count("hidden_size", most=MAX_WIDTH)
        heads = read_heads(reader, family, num_layers, hidden_size)
        input_size, _ = per_layer_input(reader, family)
        streams = read_streams(reader, family, num_layers, hidden_size)
        check_rotary(reader)
        _check_scales(reader)
        # A device keeps them in its own layers, and the library's layers take what is unpacked.
        on_card = dict(on_card or {}) if family.plain_layers else {}
        layers = _read_layers(
            reader, family, heads, hidden_size, shapes=shapes, kept=kept or {}, on_card=on_card
        )
        tied, embed_bytes = reader.flag("tie_word_embeddings"), (kept or {}).get(_EMBEDDING, 0)
        return cls(
            name=name,
            family=family.model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=reader.count("vocab_size", most=MAX_VOCABULARY),
            max_context=max_context(reader, family.long_ropes),
            tied_embeddings=tied,
            stored_dtype=_stored_dtype(reader),
            layers=layers,
            experts_per_token=_experts_per_token(reader, layers),
            cache_groups=cache_groups(heads),
            can_rewind=not family.recurrent,
            num_streams=streams.num,
            joining_elements=streams.joining_elements,
            token_id_layers=frozenset(range(num_layers)) if input_size else streams.hashed,
            layer_input_size=input_size,
            forbidden_cuts=forbidden_cuts(heads),
            kv_sources={i: layer.kv_source for i, layer in enumerate(heads) if layer.kv_source is not None},
            kept_embed_bytes=embed_bytes,
            kept_output_bytes=embed_bytes if tied else (kept or {}).get(_OUTPUT, 0),
            card_output_bytes=0 if tied else on_card.get(_OUTPUT, 0),
        )

    @property
    def num_heads(self) -> int:
        """Return the heads of the first cache group; other groups may differ."""
        return self.cache_groups[0].num_heads

    @property
    def num_kv_heads(self) -> int:
        """Return the K/V heads of the first cache group; other groups may differ."""
        return self.cache_groups[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        """Return the head width of the first cache group; other groups may differ."""
        return self.cache_groups[0].head_dim

    def with_kv_dtype(self, asked: str) -> ModelSpec:
        """Return the spec with K/V in ``asked``, or in each kernel's own dtype for "auto".

        Recurrent states stay as they are. Raises ModelError, with the reason, if the model cannot have its
        K/V in ``asked``.
        """
        if asked not in {AUTO, *KV_FORMS}:
            raise ModelError(f"kv_dtype is {asked!r}, expected {', '.join((AUTO, *KV_FORMS))}")
        if asked not in {AUTO, "f32"}:
            self._check_kv_dtype(KV_FORMS[asked])
        groups = tuple(
            replace(group, kv_dtype=asked) if group.attends else group for group in self.cache_groups
        )
        return replace(self, cache_groups=groups)

    def _check_kv_dtype(self, form: KvForm) -> None:
        compressed = any(group.is_compressed for group in self.cache_groups)
        if compressed or not any(group.attends for group in self.cache_groups):
            kept = "compressed entries" if compressed else "recurrent states"
            raise ModelError(
                f"kv_dtype is {form.name}, and {self.name} keeps {kept}, which are float32",
                hint=_KV_AUTO,
            )
        for group in self.cache_groups:
            odd = [dim for dim in (group.head_dim, group.value_dim) if dim % form.num_values]
            if group.attends and odd:
                raise ModelError(
                    f"kv_dtype is {form.name}, with a scale for each {form.num_values} values of a head, and "
                    f"{self.name} has heads of {odd[0]}",
                    hint="choose f16 or bf16",
                )

    def layer_bytes(self, layer: int, dtype: str) -> int:
        """Return the weight bytes of one layer."""
        return self.layers[layer].num_bytes(dtype)

    @property
    def vocabulary_rows(self) -> int:
        """Return the rows of the embedding and of `lm_head`, as many as any rank has."""
        return -(-self.vocab_size // self.num_ranks)

    def embed_bytes(self, dtype: str) -> int:
        """Return the bytes of the embedding matrix, [vocab_size, hidden_size]."""
        if form_of(dtype).keeps and self.kept_embed_bytes:
            return self._rows_of(self.kept_embed_bytes)
        return self.vocabulary_rows * self.hidden_size * dtype_bytes(dtype)

    def output_bytes(self, dtype: str) -> int:
        """Return the bytes of the final norm and `lm_head`, and of the weights that join streams before them.

        Tied embeddings are not considered; see `weight_bytes`.
        """
        beside = self.hidden_size + self.joining_elements
        kept_bytes, form = self._rows_of(self.kept_output_bytes), form_of(dtype)
        if form.keeps and self.tied_embeddings:
            # The embedding is not rounded.
            form = replace(form, bits=0)
        return form.linear_bytes(
            *(self.vocabulary_rows, self.hidden_size),
            head=True,
            kept_bytes=kept_bytes,
            card_bytes=self._rows_of(self.card_output_bytes),
        ) + beside * dtype_bytes(dtype)

    def _rows_of(self, num_bytes: int) -> int:
        """Return the bytes of a rank's rows, of those of all rows of the vocabulary."""
        return num_bytes * self.vocabulary_rows // self.vocab_size

    def weight_bytes(self, start: int, end: int, *, embed: bool, output: bool, dtype: str) -> int:
        """Return the weight bytes of layers [start, end), with the embedding and the output if owned.

        ``dtype`` is a dtype, or a kernel, which has more rules (`config.kernels`). A tied matrix counts
        once if embedding and output sit together, else at each of them. A packed one cannot be looked up by
        row: then the embedding lies beside it, in the dtype of the file, or of a device. One in the form of
        its file can. Layers that make an input of token ids need the embedding with them, and a norm.
        """
        total = sum(layer.num_bytes(dtype) for layer in self.layers[start:end])
        if self.needs_embedding(start, end):
            embed = True
            total += self.layer_input_size * dtype_bytes(dtype)
        if output:
            total += self.output_bytes(dtype)
        if embed and output and self.tied_embeddings:
            form = form_of(dtype)
            if form.keeps and self.kept_embed_bytes:
                return total
            held = self.stored_dtype if form.dtype == "float32" else form.dtype
            return total + (self.embed_bytes(held) if form.packed else 0)
        return total + (self.embed_bytes(dtype) if embed else 0)

    def kv_token_bytes(self, start: int, end: int, dtype: str) -> int:
        """Return the K/V bytes of one token over layers [start, end), while it is inside every window."""
        return sum(group.token_bytes(start, end, dtype) for group in self.cache_groups)

    def kv_bytes(self, start: int, end: int, num_tokens: int, dtype: str) -> int:
        """Return the K/V bytes of a sequence of ``num_tokens`` over layers [start, end); windows keep their
        window.
        """
        return sum(group.sequence_bytes(start, end, num_tokens, dtype) for group in self.cache_groups)

    def boundary_bytes(self, dtype: str) -> int:
        """Return the bytes that one token takes on every hop: [num_streams, hidden_size]."""
        return self.num_streams * self.hidden_size * dtype_bytes(dtype)

    def needs_token_ids(self, start: int, end: int) -> bool:
        """Return whether a stage of layers [start, end) needs token ids, embedding apart."""
        return any(start <= layer < end for layer in self.token_id_layers)

    def needs_embedding(self, start: int, end: int) -> bool:
        """Return whether its layers look token ids up in the embedding."""
        return self.layer_input_size > 0 and self.needs_token_ids(start, end)


def _stored_dtype(reader: ConfigReader) -> str:
    for key in ("dtype", "torch_dtype"):
        stored = reader.word(key)
        if stored is None:
            continue
        if stored not in DTYPE_BYTES:
            raise reader.wrong(key, stored, f"one of {', '.join(sorted(DTYPE_BYTES))}")
        return stored
    return "float32"


def _check_scales(reader: ConfigReader) -> None:
    """Raise ModelError for a norm's epsilon or a divisor of logits that is no number above 0.

    Raises it too for a number of rounds that would take for ever.
    """
    for key in _ABOVE_0:
        reader.optional_above_0(key)
    reader.optional_count("hc_sinkhorn_iters", most=_MAX_ROUNDS)


def _read_layers(
    reader: ConfigReader,
    family: Family,
    heads: Sequence[LayerHeads],
    hidden_size: int,
    *,
    shapes: Mapping[str, Shape] | None,
    kept: Mapping[str, int],
    on_card: Mapping[str, int],
) -> tuple[LayerWeights, ...]:
    if family.counted:
        tensors = _counted_tensors(reader.model, family, len(heads), shapes)
    else:
        tensors = [
            [*layer_tensors(reader, family, number, layer, hidden_size)] for number, layer in enumerate(heads)
        ]
    streams = read_streams(reader, family, len(heads), hidden_size)
    input_size, vocabulary = per_layer_input(reader, family)
    projection = [("per_layer_model_projection.weight", (input_size, hidden_size))] if input_size else []
    kept_by_layer, card_by_layer = (_by_layer(found, len(heads)) for found in (kept, on_card))
    return tuple(
        layer_weights(
            [*own, *projection],
            hidden_size,
            looked_up=input_size * vocabulary + streams.table_of(i),
            kept=kept_by_layer[i],
            on_card=card_by_layer[i],
        )
        for i, own in enumerate(tensors)
    )


def _by_layer(sizes: Mapping[str, int], num_layers: int) -> list[dict[str, int]]:
    """Return the sizes of each layer's tensors, by their names behind ``model.layers.N.``."""
    found: list[dict[str, int]] = [{} for _ in range(num_layers)]
    for name, num_bytes in sizes.items():
        match = _LAYER_TENSOR.match(name)
        if match and int(match[1]) < num_layers:
            found[int(match[1])][name[match.end() :]] = num_bytes
    return found


def _counted_tensors(
    name: str, family: Family, num_layers: int, shapes: Mapping[str, Shape] | None
) -> list[list[tuple[str, Shape]]]:
    if shapes is None:
        raise ModelError(
            f"{name}: a model of type {family.model_type} is planned from its weight files",
            hint="name a directory that has the model's weights",
        )
    tensors: list[list[tuple[str, Shape]]] = [[] for _ in range(num_layers)]
    for tensor, shape in shapes.items():
        match = _LAYER_TENSOR.match(tensor)
        # Layers beyond the last belong to a drafter, and rotary frequencies are computed anew.
        if match and int(match[1]) < num_layers and not tensor.endswith("rotary_emb.inv_freq"):
            tensors[int(match[1])].append((tensor[match.end() :], shape))
    return tensors


def _experts_per_token(reader: ConfigReader, layers: Sequence[LayerWeights]) -> int:
    """Return the experts of a token; without any of the library's three keys, all experts count as used."""
    most = max((layer.num_experts for layer in layers), default=0)
    words = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token")
    written = [word for word in words if reader.has(word)]
    return reader.count(written[0], most=most) if most and written else most
