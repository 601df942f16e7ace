"""Cache groups: layers whose K/V grows and is dropped alike, and therefore shares one block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convoy.plan.spec.kernels import DTYPE_BYTES, form_of

STATE_TILE = 16  # tokens that a delta net takes together, from multiples of this position on

CacheKind = Literal["kv", "latent", "recurrent", "entries", "pending"]


def dtype_bytes(word: str) -> int:
    """Bytes of one element of K/V in a dtype, or under a kernel; ModelError for what is neither."""
    return DTYPE_BYTES[form_of(word).dtype]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens, in one geometry.

    Its index in `ModelSpec.cache_groups` is a `BlockGrant`'s group. ``kind`` says what a layer keeps: "kv", K
    and V of each head of each token; "latent", one row of ``head_dim`` for all heads, the first
    ``value_dim`` of which are its values; "recurrent", ``state_elements`` for a sequence however long it is,
    whose heads are ``num_heads`` of values and ``num_kv_heads`` of keys; "entries", a row of ``row_elements``
    for every ``stride`` tokens, compressed from what "pending" keeps: a row of ``row_elements`` for each
    token of the window. A layer may be in several groups.
    """

    name: str  # "full", "window-4096"
    window: int | None  # tokens that a layer looks back on, its own included; None: all of them
    layers: tuple[int, ...]  # ascending
    num_heads: int  # of queries
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int
    kind: CacheKind = "kv"
    state_elements: int = 0  # of a sequence, in one layer
    num_taps: int = 0  # tokens over which a recurrent layer's convolution goes, its own included
    row_elements: int = 0  # of what one row keeps, where heads do not say it
    stride: int = 1  # tokens for which there is one row

    @property
    def elements_per_token(self) -> int:
        """K and V elements of one token in one layer; of several tokens that share a row, each one's part."""
        return -(-self._elements_per_row // self.stride)

    @property
    def _elements_per_row(self) -> int:
        if self.kind == "recurrent":
            return 0
        if self.row_elements:
            return self.row_elements
        values = 0 if self.kind == "latent" else self.value_dim
        return self.num_kv_heads * (self.head_dim + values)

    @property
    def is_full(self) -> bool:
        """Whether every token is kept, so that sequences may share the blocks of a prefix."""
        return self.kind in {"kv", "latent"} and self.window is None

    @property
    def is_carried(self) -> bool:
        """Whether a block is K and V of one width, as a session's file has them."""
        return self.kind == "kv" and self.head_dim == self.value_dim

    @property
    def attends(self) -> bool:
        """Whether its rows are keys and values by themselves."""
        return self.kind in {"kv", "latent"}

    def num_blocks(self, num_tokens: int, block_size: int) -> int:
        """How many blocks have rows for so many tokens; windows apart."""
        return -(-num_tokens // (block_size * self.stride))

    def ring_blocks(self, block_size: int, max_row_tokens: int) -> int | None:
        """With so many blocks a table need not grow any more; None: it has to, with every token.

        A row of at most ``max_row_tokens`` writes over nothing that its first token looks back on.
        """
        if self.kind == "recurrent":
            return 1
        if self.window is None:
            return None
        return -(-(self.window - 1 + max_row_tokens) // block_size) + 1

    def token_bytes(self, start: int, end: int, dtype: str) -> int:
        """K/V bytes that one retained token takes over this group's layers in [start, end)."""
        return self._num_owned(start, end) * self.elements_per_token * dtype_bytes(dtype)

    def block_bytes(self, start: int, end: int, block_size: int, dtype: str) -> int:
        """Bytes of one block over the layers in [start, end); of a recurrent group, of a whole sequence."""
        elements = self.state_elements if self.kind == "recurrent" else block_size * self._elements_per_row
        return self._num_owned(start, end) * elements * dtype_bytes(dtype)

    def sequence_bytes(self, start: int, end: int, num_tokens: int, dtype: str) -> int:
        """Bytes that a sequence of ``num_tokens`` has to keep over this group's layers in [start, end)."""
        rows = -(-self.retained_tokens(num_tokens) // self.stride)
        elements = self.state_elements + self._elements_per_row * rows
        return self._num_owned(start, end) * elements * dtype_bytes(dtype)

    def retained_tokens(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` past tokens a layer still needs."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def _num_owned(self, start: int, end: int) -> int:
        return sum(start <= layer < end for layer in self.layers)
