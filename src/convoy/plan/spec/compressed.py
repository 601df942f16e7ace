"""Compressed attention, as in DeepSeek V4's layers.

They look back on few tokens directly, and on the rest in entries, each made of several tokens. The reader
follows the family's configuration in `transformers`, with the older words that it understands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from convoy.plan.spec.cache import CacheGroup
from convoy.plan.spec.config import ConfigReader

# Of widths, windows and rates.
_MOST = 1 << 20
SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
HASHED, ROUTED = "hash_moe", "moe"
# The meaning of `compress_ratios`.
_OF_RATE = {0: SLIDING, 4: SPARSE, 128: HEAVY}
_RATES = {SPARSE: ("compress_rate_csa", 4), HEAVY: ("compress_rate_hca", 128)}
_HASH_LAYERS = 3

CompressionKind = Literal["sparse", "heavy"]


@dataclass(frozen=True)
class Compression:
    """Describe how a layer makes its entries: one for every ``rate`` tokens.

    "heavy" entries are made of those tokens; a token sees every entry. "sparse" entries are made of those and
    as many before them, with a second key of ``index_dim`` each, by which a token chooses the ``index_topk``
    entries that it sees.
    """

    kind: CompressionKind
    rate: int
    index_heads: int = 0
    index_dim: int = 0
    index_topk: int = 0

    @property
    def series(self) -> int:
        """Return the numbers that a token gives of each element: for its own entry, and for the next."""
        return 2 if self.kind == "sparse" else 1

    @property
    def span(self) -> int:
        """Return the number of tokens that an entry is made of."""
        return self.series * self.rate


def read_compressions(reader: ConfigReader, num_layers: int) -> list[Compression | None]:
    """Return how each layer compresses; None if it only has a window.

    Raises ModelError for impossible values.
    """
    made: dict[str, Compression | None] = {SLIDING: None}
    kinds = layer_kinds(reader, num_layers)
    if HEAVY in kinds:
        made[HEAVY] = Compression("heavy", _rate(reader, HEAVY))
    if SPARSE in kinds:
        made[SPARSE] = Compression(
            "sparse",
            _rate(reader, SPARSE),
            reader.count("index_n_heads", most=_MOST),
            reader.count("index_head_dim", most=_MOST),
            reader.count("index_topk", most=_MOST),
        )
    return [made[kind] for kind in kinds]


def layer_kinds(reader: ConfigReader, num_layers: int) -> list[str]:
    """Return the attention of each layer."""
    ratios = reader.get("compress_ratios")
    if reader.get("layer_types") is None and ratios is not None:
        if not isinstance(ratios, list | tuple) or not all(
            isinstance(ratio, int) and ratio in _OF_RATE for ratio in ratios
        ):
            raise reader.wrong("compress_ratios", ratios, f"a list of {sorted(_OF_RATE)}")
        return _enough(reader, "compress_ratios", [_OF_RATE[ratio] for ratio in ratios], num_layers)
    default = [HEAVY] * min(num_layers, 2) + [SPARSE if i % 2 else HEAVY for i in range(num_layers - 2)]
    return _words(reader, "layer_types", (SLIDING, SPARSE, HEAVY), default)


def hashed_layers(reader: ConfigReader, num_layers: int) -> frozenset[int]:
    """Return the layers with experts chosen by token id."""
    num_hashed = reader.get("num_hash_layers")
    if num_hashed is None:
        num_hashed = _HASH_LAYERS
    if isinstance(num_hashed, bool) or not isinstance(num_hashed, int) or num_hashed < 0:
        raise reader.wrong("num_hash_layers", num_hashed, "a whole number from 0")
    default = [HASHED if layer < num_hashed else ROUTED for layer in range(num_layers)]
    kinds = _words(reader, "mlp_layer_types", (HASHED, ROUTED), default)
    return frozenset(layer for layer, kind in enumerate(kinds) if kind == HASHED)


def compressed_groups(
    compressions: Sequence[Compression | None], num_heads: int, head_dim: int
) -> tuple[CacheGroup, ...]:
    """Return, for each kind of layer, the groups of its entries and of its tokens not yet compressed."""
    groups = []
    for made in dict.fromkeys(one for one in compressions if one is not None):
        layers = tuple(layer for layer, one in enumerate(compressions) if one == made)
        heads = (layers, num_heads, 1, head_dim, head_dim)
        width = head_dim + made.index_dim
        entries = CacheGroup(f"entries-{made.rate}", None, *heads, "entries")
        pending = CacheGroup(f"pending-{made.span}", made.span, *heads, "pending")
        groups += [
            replace(entries, row_elements=width, stride=made.rate),
            # A number and its gate.
            replace(pending, row_elements=2 * made.series * width),
        ]
    return tuple(groups)


def _rate(reader: ConfigReader, kind: str) -> int:
    older, default = _RATES[kind]
    if reader.get(older) is not None:
        return reader.count(older, most=_MOST)
    rates = reader.get("compress_rates")
    if rates is None:
        return default
    if not isinstance(rates, Mapping):
        raise reader.wrong("compress_rates", rates, "an object")
    return ConfigReader(rates, reader.model).count(kind, most=_MOST)


def _words(reader: ConfigReader, key: str, allowed: Sequence[str], default: Sequence[str]) -> list[str]:
    found = reader.words(key)
    if found is None:
        return list(default)
    for kind in found:
        if kind not in allowed:
            raise reader.wrong(key, kind, f"one of {', '.join(allowed)}")
    return _enough(reader, key, found, len(default))


def _enough(reader: ConfigReader, key: str, found: Sequence[str], num_layers: int) -> list[str]:
    """Return the first ``num_layers`` entries, because the library ignores those beyond the last layer."""
    if len(found) < num_layers:
        raise reader.wrong(key, f"{len(found)} entries", f"num_hidden_layers = {num_layers} entries")
    return list(found[:num_layers])
