"""Cache groups: layers whose K/V grows and is dropped alike, and therefore shares one block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from convoy.errors import ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

CacheKind = Literal["kv", "latent", "recurrent"]


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; ModelError for a dtype that no stage computes in."""
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype!r} is not known, expected one of {', '.join(sorted(DTYPE_BYTES))}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens, in one geometry.

    Its index in `ModelSpec.cache_groups` is a `BlockGrant`'s group. ``kind`` says what a layer keeps: "kv", K
    and V of each head of each token; "latent", one row of ``head_dim`` for all heads, the first
    ``value_dim`` of which are its values; "recurrent", ``state_elements`` for a sequence however long it is.
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

    @property
    def elements_per_token(self) -> int:
        """K and V elements of one token in one layer."""
        if self.kind == "recurrent":
            return 0
        values = 0 if self.kind == "latent" else self.value_dim
        return self.num_kv_heads * (self.head_dim + values)

    @property
    def is_full(self) -> bool:
        """Whether every token is kept, so that sequences may share the blocks of a prefix."""
        return self.kind != "recurrent" and self.window is None

    @property
    def is_carried(self) -> bool:
        """Whether a block is K and V of one width, as a session's file has them."""
        return self.kind == "kv" and self.head_dim == self.value_dim

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
        elements = self.state_elements if self.kind == "recurrent" else block_size * self.elements_per_token
        return self._num_owned(start, end) * elements * dtype_bytes(dtype)

    def sequence_bytes(self, start: int, end: int, num_tokens: int, dtype: str) -> int:
        """Bytes that a sequence of ``num_tokens`` has to keep over this group's layers in [start, end)."""
        state = self._num_owned(start, end) * self.state_elements * dtype_bytes(dtype)
        return state + self.token_bytes(start, end, dtype) * self.retained_tokens(num_tokens)

    def retained_tokens(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` past tokens a layer still needs."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def _num_owned(self, start: int, end: int) -> int:
        return sum(start <= layer < end for layer in self.layers)
