"""Look for what must not be seen in recorded bytes: text, token ids however packed, activations.

Reused wherever something crosses: give the recording and the secrets, get every find.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

RUN_TOKENS = 8
PIECE_BYTES = 16
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Secrets:
    """Hold the secrets: ``activations`` as raw bytes, looked for in pieces of 16 at every offset."""

    texts: Sequence[str] = ()
    token_ids: Sequence[Sequence[int]] = ()
    activations: Sequence[bytes] = field(default=())


def find_secrets(recorded: bytes | bytearray, secrets: Secrets) -> list[str]:
    """Return the finds in words; an empty list means that nothing leaked.

    Texts as UTF-8 and UTF-16, whole and each word of eight letters or more; every run of eight token ids as
    integers of 8, 16, 32 and 64 bits (where they fit) of both byte orders, and as msgpack; every 16 bytes of
    an activation, at any offset, that are not a mere repetition.
    """
    haystack = bytes(recorded)
    found = [f"text {kind}" for kind, needle in _texts(secrets.texts) if needle in haystack]
    found += [
        f"token ids {start}-{start + RUN_TOKENS} of prompt {index} as {kind}"
        for index, ids in enumerate(secrets.token_ids)
        for start in range(len(ids) - RUN_TOKENS + 1)
        for kind, needle in _packed(ids[start : start + RUN_TOKENS])
        if needle in haystack
    ]
    found += [
        f"activation {index} at byte {offset}"
        for index, offset in _shared_pieces(haystack, secrets.activations)
    ]
    return found


def _texts(texts: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    for text in texts:
        for piece in {text, *(word for word in text.split() if len(word) >= 8)}:
            for encoding in ("utf-8", "utf-16-le", "utf-16-be"):
                yield f"as {encoding}", piece.encode(encoding)


def _packed(ids: Sequence[int]) -> Iterable[tuple[str, bytes]]:
    for width in _WIDTHS:
        if max(ids) < 1 << (8 * width):
            for order in ("little", "big"):
                if width > 1 or order == "little":
                    packed = b"".join(i.to_bytes(width, order) for i in ids)
                    yield f"{8 * width}-bit {order}-endian", packed
    yield "msgpack", b"".join(_msgpack(i) for i in ids)


def _msgpack(value: int) -> bytes:
    if value < 0x80:
        return bytes([value])
    for marker, width in ((0xCC, 1), (0xCD, 2), (0xCE, 4)):
        if value < 1 << (8 * width):
            return bytes([marker]) + value.to_bytes(width, "big")
    return b"\xcf" + value.to_bytes(8, "big")


def _shared_pieces(haystack: bytes, activations: Sequence[bytes]) -> list[tuple[int, int]]:
    """Return index and offset of the pieces that also stand in the haystack, at any offset there.

    The haystack is read once for all activations: it has a million offsets, and there are hundreds of them.
    """
    telling = {piece for activation in activations for _, piece in _pieces(activation) if len(set(piece)) > 3}
    hits = {piece for _, piece in _pieces(haystack) if piece in telling}
    return [
        (index, offset)
        for index, activation in enumerate(activations if hits else ())
        for offset, piece in _pieces(activation)
        if piece in hits
    ]


def _pieces(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield every piece with its offset."""
    for offset in range(len(data) - PIECE_BYTES + 1):
        yield offset, data[offset : offset + PIECE_BYTES]
