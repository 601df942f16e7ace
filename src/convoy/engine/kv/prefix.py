"""Prefix tags: 16 bytes that stand for every token before a position, under a key that only the head has.

T(0) is the root of a salt. Within a block, T(p) is a MAC over T at the block's start and the block's tokens
up to p. T at a block's end is the start of the next block. So equal tags mean equal salts and equal tokens,
and a member that sees them learns neither. The chain of block hashes is that of vLLM's prefix cache
("Automatic Prefix Caching"). It is keyed here because the tags leave this process.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Sequence

from convoy.wire.messages.control import OPEN_TAG, PREFIX_TAG_BYTES

_KEY_BYTES = 32
_HASH_BLOCK_BYTES = 64


class PrefixTags:
    """Make tags for blocks of ``block_size`` tokens.

    ``key`` has 32 bytes; each process makes a random one by default.
    """

    def __init__(self, block_size: int, key: bytes | None = None) -> None:
        self._block_size = block_size
        self._words = [struct.Struct(f"<{count}I") for count in range(block_size + 1)]
        # HMAC-SHA-256 (RFC 2104) with its two states kept ready, because every row needs several tags.
        padded = (secrets.token_bytes(_KEY_BYTES) if key is None else key).ljust(_HASH_BLOCK_BYTES, b"\0")
        self._inner = hashlib.sha256(bytes(byte ^ 0x36 for byte in padded))
        self._outer = hashlib.sha256(bytes(byte ^ 0x5C for byte in padded))

    def root(self, salt: bytes) -> bytes:
        """Return T(0); sequences of different salts never have a tag in common."""
        # These 45 bytes differ from every other input of this MAC: the others have multiples of 4.
        return self._mac(b"convoy prefix" + hashlib.sha256(salt).digest())

    def extend(self, chain: list[bytes], tokens: Sequence[int], num_blocks: int) -> None:
        """Extend ``chain``, which holds T(0), by T at the ends of the first ``num_blocks`` blocks."""
        while len(chain) <= num_blocks:
            start = (len(chain) - 1) * self._block_size
            chain.append(self._after(chain[-1], tokens[start : start + self._block_size]))

    def at(self, chain: list[bytes], tokens: Sequence[int], position: int) -> bytes:
        """Return T(position), the tag of the tokens before ``position``."""
        block = position // self._block_size
        self.extend(chain, tokens, block)
        start = block * self._block_size
        return chain[block] if position == start else self._after(chain[block], tokens[start:position])

    def of_row(
        self, chain: list[bytes], tokens: Sequence[int], start: int, end: int, num_outputs: int
    ) -> tuple[bytes, bytes]:
        """Return a row's ``tag``, T(start), and its ``tags``.

        The tags are T at every block end in (start, end], then T after each of the last max(1, num_outputs)
        positions.
        """
        first, last = start // self._block_size, end // self._block_size
        if first == last and end == start + 1:
            return self._of_decode(chain, tokens, start, first)
        tag = self.at(chain, tokens, start)
        self.extend(chain, tokens, last)
        after = [self.at(chain, tokens, p) for p in range(end - max(1, num_outputs) + 1, end + 1)]
        return tag, b"".join(chain[first + 1 : last + 1] + after)

    def of_fed(self, chain: list[bytes], tokens: Sequence[int]) -> tuple[bytes, bytes]:
        """Return the tags as `of_row` does, for a row of the one token behind all known ``tokens``.

        Its own tags are open: the next row has them.
        """
        start = len(tokens)
        num_ends = (start + 1) // self._block_size - start // self._block_size
        return self.at(chain, tokens, start), OPEN_TAG * (num_ends + 1)

    def _of_decode(
        self, chain: list[bytes], tokens: Sequence[int], position: int, block: int
    ) -> tuple[bytes, bytes]:
        """Return the tags as `of_row` does, for the usual row of one token within a block, packed once."""
        self.extend(chain, tokens, block)
        known = tokens[block * self._block_size : position + 1]
        data = chain[block] + self._words[len(known)].pack(*known)
        before = chain[block] if len(known) == 1 else self._mac(data[:-4])
        return before, self._mac(data)

    def _after(self, tag: bytes, tokens: Sequence[int]) -> bytes:
        return self._mac(tag + self._words[len(tokens)].pack(*tokens))

    def _mac(self, data: bytes) -> bytes:
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(data)
        outer.update(inner.digest())
        return outer.digest()[:PREFIX_TAG_BYTES]
