"""Cache groups: layers that keep and drop K/V alike, and therefore share one block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convoy.config.kernels import AUTO, DTYPE_BYTES, EXACT, KV_FORMS, form_of, kv_form

# Tokens that a delta net takes together, from multiples of this position on.
STATE_TILE = 16

CacheKind = Literal["kv", "latent", "recurrent", "entries", "pending"]


def dtype_bytes(word: str) -> int:
    """Return the bytes of one element that is not rounded, in a dtype or under a kernel.

    Raises ModelError for other words.
    """
    return DTYPE_BYTES[form_of(word).dtype]


@dataclass(frozen=True)
class CacheGroup:
    """Describe layers that keep the same tokens, in one geometry.

    Its index in `ModelSpec.cache_groups` is a `BlockGrant`'s group. A layer may be in several groups.
    ``kind`` tells which rows a layer keeps:

    - "kv": K and V of each head of each token;
    - "latent": one row of ``head_dim`` for all heads; its first ``value_dim`` elements are the values;
    - "recurrent": ``state_elements`` for a sequence, however long it is; ``num_heads`` counts heads of
      values, and ``num_kv_heads`` those of keys;
    - "entries": a row of ``row_elements`` for every ``stride`` tokens, compressed from the rows of "pending";
    - "pending": a row of ``row_elements`` for each token of the window.
    """

    # Such as "full" or "window-4096".
    name: str
    # Tokens that a layer looks back on, its own included; None: all of them.
    window: int | None
    # Ascending.
    layers: tuple[int, ...]
    # Of queries.
    num_heads: int
    num_kv_heads: int
    # Of queries and keys.
    head_dim: int
    value_dim: int
    kind: CacheKind = "kv"
    # Of a sequence, in one layer.
    state_elements: int = 0
    # Tokens of a recurrent layer's convolution, its own included.
    num_taps: int = 0
    # Elements of one row, where heads do not give it.
    row_elements: int = 0
    # Tokens that share one row.
    stride: int = 1
    # A word of `config.kernels.KV_FORMS`; "auto": the kernel's own.
    kv_dtype: str = AUTO

    @property
    def host_dtype(self) -> str:
        """Return the dtype of its keys and values on hosts, which all have one of their own."""
        return kv_form(EXACT, self.kv_dtype).name

    @property
    def elements_per_token(self) -> int:
        """Return the K and V elements of one token in one layer; a token's part where several share a row."""
        return -(-self._elements_per_row // self.stride)

    @property
    def _elements_per_row(self) -> int:
        if self.is_state:
            return 0
        if self.row_elements:
            return self.row_elements
        values = 0 if self.is_latent else self.value_dim
        return self.num_kv_heads * (self.head_dim + values)

    @property
    def has_heads(self) -> bool:
        """Return whether each K/V head has keys and values of its own."""
        return self.kind == "kv"

    @property
    def is_latent(self) -> bool:
        """Return whether all heads share a row, and the values are a part of it."""
        return self.kind == "latent"

    @property
    def is_compressed(self) -> bool:
        """Return whether its rows are entries, each for several tokens."""
        return self.kind == "entries"

    @property
    def is_pending(self) -> bool:
        """Return whether its rows are tokens that wait to be compressed."""
        return self.kind == "pending"

    @property
    def index_dim(self) -> int:
        """Return the width of the second keys, by which a query chooses its entries; 0 without them."""
        return self.row_elements - self.head_dim if self.is_compressed else 0

    @property
    def is_state(self) -> bool:
        """Return whether a layer keeps one state of a sequence, however long that is."""
        return self.kind == "recurrent"

    @property
    def has_keys(self) -> bool:
        """Return whether queries meet its rows as keys."""
        return self.kind in {"kv", "latent", "entries"}

    @property
    def is_full(self) -> bool:
        """Return whether every token is kept, so that sequences may share the blocks of a prefix."""
        return self.kind in {"kv", "latent"} and self.window is None

    @property
    def is_carried(self) -> bool:
        """Return whether a block is K and V of one width, as a session's file stores them."""
        return self.has_heads and self.head_dim == self.value_dim

    @property
    def attends(self) -> bool:
        """Return whether its rows are keys and values by themselves."""
        return self.kind in {"kv", "latent"}

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """Return how many blocks have rows for ``num_tokens``, without regard to windows."""
        return -(-num_tokens // (block_size * self.stride))

    def ring_blocks(self, block_size: int, max_row_tokens: int) -> int | None:
        """Return the number of blocks at which a table stops growing; None if it grows with every token.

        A row of at most ``max_row_tokens`` then overwrites no position that its first token looks back on.
        """
        if self.is_state:
            return 1
        if self.window is None:
            return None
        return -(-(self.window - 1 + max_row_tokens) // block_size) + 1

    def token_bytes(self, start: int, end: int, dtype: str) -> int:
        """Return the K/V bytes that one retained token takes over this group's layers in [start, end)."""
        return self._num_bytes(self._num_owned(start, end) * self.elements_per_token, dtype)

    def block_bytes(self, start: int, end: int, block_size: int, dtype: str) -> int:
        """Return a block's bytes over layers [start, end); for a recurrent group, a whole sequence's."""
        elements = self.state_elements if self.is_state else block_size * self._elements_per_row
        return self._num_bytes(self._num_owned(start, end) * elements, dtype)

    def sequence_bytes(self, start: int, end: int, num_tokens: int, dtype: str) -> int:
        """Return the bytes of a sequence of ``num_tokens`` over this group's layers in [start, end)."""
        rows = -(-self.retained_tokens(num_tokens) // self.stride)
        elements = self.state_elements + self._elements_per_row * rows
        return self._num_bytes(self._num_owned(start, end) * elements, dtype)

    def retained_tokens(self, num_tokens: int) -> int:
        """Return how many of ``num_tokens`` past tokens a layer still needs."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def _num_bytes(self, elements: int, dtype: str) -> int:
        # Every backend holds states in float32.
        form = KV_FORMS["f32"] if self.is_state else kv_form(dtype, self.kv_dtype)
        return form.num_bytes(elements)

    def _num_owned(self, start: int, end: int) -> int:
        return sum(start <= layer < end for layer in self.layers)
