"""Prefix tags: 16 bytes that stand for every token before a position, under a key that only the head has.

T(0) is the root of a salt. Within a block, T(p) is a MAC over T at the block's start and the block's tokens
up to p; T at a block's end is the start of the next. So equal tags mean equal salts and equal tokens, and a
member that sees them learns neither. The chain of block hashes is that of vLLM's prefix cache ("Automatic
Prefix Caching"), keyed here because the tags leave this process.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
from collections.abc import Sequence

from convoy.wire.messages import PREFIX_TAG_BYTES


class PrefixTags:
    """Makes tags for blocks of ``block_size`` tokens. ``key`` is 32 bytes, drawn anew for each process."""

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self._block_size = block_size
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, salt: bytes) -> bytes:
        """T(0): sequences of different salts never have a tag in common."""
        # 45 bytes, which no other input of this MAC has: those are multiples of 4
        return self._mac(b"convoy prefix" + hashlib.sha256(salt).digest())

    def extend(self, chain: list[bytes], tokens: Sequence[int], num_blocks: int) -> None:
        """Make ``chain``, which holds T(0), hold T at the ends of the first ``num_blocks`` blocks too."""
        while len(chain) <= num_blocks:
            start = (len(chain) - 1) * self._block_size
            chain.append(self._after(chain[-1], tokens[start : start + self._block_size]))

    def at(self, chain: list[bytes], tokens: Sequence[int], position: int) -> bytes:
        """T(position): of the tokens before it."""
        block = position // self._block_size
        self.extend(chain, tokens, block)
        start = block * self._block_size
        return chain[block] if position == start else self._after(chain[block], tokens[start:position])

    def of_row(
        self, chain: list[bytes], tokens: Sequence[int], start: int, end: int, num_outputs: int
    ) -> bytes:
        """T at every block end in (start, end], then after each of the last max(1, num_outputs) positions."""
        self.extend(chain, tokens, end // self._block_size)
        ends = chain[start // self._block_size + 1 : end // self._block_size + 1]
        last = [self.at(chain, tokens, p) for p in range(end - max(1, num_outputs) + 1, end + 1)]
        return b"".join(ends + last)

    def _after(self, tag: bytes, tokens: Sequence[int]) -> bytes:
        return self._mac(tag + struct.pack(f"<{len(tokens)}I", *tokens))

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")[:PREFIX_TAG_BYTES]
