"""What a plan must know about a model, read from its `config.json` alone: no weights are opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from convoy.plan.cache import DTYPE_BYTES, CacheGroup, dtype_bytes
from convoy.plan.config import ConfigReader
from convoy.plan.family import (
    MAX_CONTEXT,
    MAX_LAYERS,
    MAX_VOCABULARY,
    MAX_WIDTH,
    layer_elements,
    read_attention,
    read_cache_groups,
    read_family,
)


@dataclass(frozen=True)
class ModelSpec:
    """A model's shape. Byte counts take the dtype in which a stage holds the weights, not the one on disk."""

    name: str
    family: str  # config.json's model_type: "llama"
    num_layers: int
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # tokens
    tied_embeddings: bool  # the output reuses the embedding matrix, so both owners need it
    stored_dtype: str  # of the checkpoint, as config.json claims; "float32" where it does not
    layer_elements: tuple[int, ...]  # weight elements of each layer
    cache_groups: tuple[CacheGroup, ...]
    can_rewind: bool = True  # rows may write over the last positions: not so where state is recurrent
    num_streams: int = 1  # hidden states that cross a boundary for each token
    token_id_layers: frozenset[int] = field(default_factory=frozenset)  # layers that need token ids
    forbidden_cuts: Mapping[int, str] = field(
        default_factory=dict
    )  # first layer after the cut -> why not there
    is_packed: bool = False  # whether linears are held as exact mode packs them

    @classmethod
    def from_config(cls, config: Mapping[str, object], name: str) -> ModelSpec:
        """Read a parsed `config.json`; ``name`` is what errors call the model.

        Raises ModelError for an unsupported type, and for a missing, absurd or contradictory value.
        """
        reader = ConfigReader(config, name)
        family = read_family(reader)
        num_layers = reader.count("num_hidden_layers", most=MAX_LAYERS)
        hidden_size = reader.count("hidden_size", most=MAX_WIDTH)
        attention = read_attention(reader, family, hidden_size)
        stored = reader.word("dtype") or reader.word("torch_dtype") or "float32"
        if stored not in DTYPE_BYTES:
            raise reader.wrong("dtype", stored, f"one of {', '.join(sorted(DTYPE_BYTES))}")
        return cls(
            name=name,
            family=family.model_type,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=reader.count("vocab_size", most=MAX_VOCABULARY),
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            max_context=reader.count("max_position_embeddings", most=MAX_CONTEXT),
            tied_embeddings=reader.flag("tie_word_embeddings"),
            stored_dtype=stored,
            layer_elements=(layer_elements(reader, family, hidden_size, attention),) * num_layers,
            cache_groups=read_cache_groups(reader, family, num_layers, attention),
        )

    def packed(self) -> ModelSpec:
        """The same model as exact mode holds it."""
        return replace(self, is_packed=True)

    def layer_bytes(self, layer: int, dtype: str) -> int:
        """Weight bytes of one layer."""
        return self.layer_elements[layer] * dtype_bytes(dtype)

    def embed_bytes(self, dtype: str) -> int:
        """Bytes of the embedding matrix, [vocab_size, hidden_size]."""
        return self.vocab_size * self.hidden_size * dtype_bytes(dtype)

    def output_bytes(self, dtype: str) -> int:
        """Bytes of the final norm and `lm_head`, by itself; see `weight_bytes` for tied embeddings."""
        return (self.vocab_size + 1) * self.hidden_size * dtype_bytes(dtype)

    def weight_bytes(self, start: int, end: int, *, embed: bool, output: bool, dtype: str) -> int:
        """Weight bytes of layers [start, end) with what else is owned.

        A tied matrix counts once where embedding and output sit together, else at each of them. A packed one
        cannot be looked up by row: then the embedding lies beside it, in the dtype of the file.
        """
        total = sum(self.layer_elements[start:end]) * dtype_bytes(dtype)
        if embed:
            total += self.embed_bytes(dtype)
        if output:
            total += self.output_bytes(dtype)
        if embed and output and self.tied_embeddings:
            total -= self.embed_bytes(dtype)
            if self.is_packed:
                total += self.embed_bytes(self.stored_dtype)
        return total

    def kv_token_bytes(self, start: int, end: int, dtype: str) -> int:
        """K/V bytes of one token over layers [start, end), while it is inside every window."""
        return sum(group.token_bytes(start, end, dtype) for group in self.cache_groups)

    def kv_bytes(self, start: int, end: int, num_tokens: int, dtype: str) -> int:
        """K/V bytes of a sequence of ``num_tokens`` over layers [start, end); windows keep their window."""
        return sum(group.sequence_bytes(start, end, num_tokens, dtype) for group in self.cache_groups)

    def boundary_bytes(self, dtype: str) -> int:
        """Bytes that one token takes on every hop: [num_streams, hidden_size]."""
        return self.num_streams * self.hidden_size * dtype_bytes(dtype)

    def needs_token_ids(self, start: int, end: int) -> bool:
        """Whether a stage of layers [start, end) needs token ids, embedding apart."""
        return any(start <= layer < end for layer in self.token_id_layers)
