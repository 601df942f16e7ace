"""Cache groups: layers whose K/V grows and is dropped alike, and therefore shares one block table."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import ModelError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element; ModelError for a dtype that no stage computes in."""
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype!r} is not known, expected one of {', '.join(sorted(DTYPE_BYTES))}")
    return DTYPE_BYTES[dtype]


@dataclass(frozen=True)
class CacheGroup:
    """Layers that keep the same tokens; its index in `ModelSpec.cache_groups` is a `BlockGrant`'s group."""

    name: str  # "full", "window-4096"
    window: int | None  # tokens that a layer looks back on, its own included; None: all of them
    layers: tuple[int, ...]  # ascending
    elements_per_token: int  # K and V elements of one token in one layer

    def token_bytes(self, start: int, end: int, dtype: str) -> int:
        """K/V bytes that one retained token takes over this group's layers in [start, end)."""
        owned = sum(start <= layer < end for layer in self.layers)
        return owned * self.elements_per_token * dtype_bytes(dtype)

    def retained_tokens(self, num_tokens: int) -> int:
        """How many of ``num_tokens`` past tokens a layer still needs."""
        return num_tokens if self.window is None else min(num_tokens, self.window)
