"""Bound the text that one token can stand for, to refuse a long prompt before it is tokenised."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

# The most bytes of text that become one byte under a Unicode normal form, over all code points (NFKC: a
# mathematical letter of four bytes becomes an ASCII letter).
_NORMAL_FORM = 4.0
_KEEPS_ALL_TEXT = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_MAX_CHARACTER_BYTES = 4

# The bound where no exact one holds: sixteen times what a token of usual text has.
GENEROUS_TOKEN_BYTES = 64
_LEAST_BYTES = 256 * 1024


def most_text_bytes(max_tokens: int, longest: int | None) -> int:
    """Return the most UTF-8 bytes of text that ``max_tokens`` tokens stand for.

    ``longest`` is the most bytes of one token, or None for a generous bound in its place.
    """
    if longest is None:
        return max(_LEAST_BYTES, max_tokens * GENEROUS_TOKEN_BYTES)
    return max_tokens * longest


def most_message_bytes(max_tokens: int, longest: int | None) -> int:
    """Return the most bytes that the messages of a chat may have together, before the template renders them.

    The bound is generous: a template may leave text out, such as an earlier turn's reasoning.
    """
    return max(most_text_bytes(max_tokens, None), most_text_bytes(max_tokens, longest))


def longest_token_bytes(tokenizer: Mapping[str, Any], letters: Collection[str]) -> int | None:
    """Return the most UTF-8 bytes of text that one token stands for, by the tokenizer's own description.

    ``letters`` is the alphabet in which a byte-level vocabulary writes the 256 bytes. Returns None if no
    bound holds: a part of the tokenizer deletes text, or merges any run of it into one token.
    """
    normalizer = _shrinks_by(tokenizer.get("normalizer"))
    stages = _flat(tokenizer.get("pre_tokenizer"), "pretokenizers")
    byte_level = any(stage.get("type") == "ByteLevel" for stage in stages) or any(
        stage.get("type") == "ByteLevel" for stage in _flat(tokenizer.get("normalizer"), "normalizers")
    )
    longest = _longest_piece(tokenizer.get("model") or {}, letters if byte_level else None)
    if normalizer is None or longest is None or not all(_keeps_all(stage) for stage in stages):
        return None
    for token in tokenizer.get("added_tokens") or ():
        # Such a token takes any run of white space beside it with it. A control token of one letter has no
        # spelling in text, so its text is deleted.
        if token.get("lstrip") or token.get("rstrip") or len(token["content"]) == 1:
            return None
        longest = max(longest, len(token["content"].encode(errors="surrogatepass")))
    return math.ceil(longest * normalizer)


def _longest_piece(model: Mapping[str, Any], letters: Collection[str] | None) -> int | None:
    """Return the bytes of the vocabulary's longest entry, or None where an unknown run becomes one token."""
    vocabulary = model.get("vocab") or ()
    kind = model.get("type")
    # An older file of a BPE model does not name its type.
    if kind is None and "merges" in model:
        kind = "BPE"
    if kind == "Unigram":
        pieces = {entry[0] for entry in vocabulary}
        falls_back = bool(model.get("byte_fallback"))
    elif kind == "BPE":
        pieces = set(vocabulary)
        falls_back = bool(model.get("byte_fallback"))
    else:
        return None
    if letters is not None:
        return max(map(len, pieces)) if pieces.issuperset(letters) else None
    longest = max((len(piece.encode(errors="surrogatepass")) for piece in pieces), default=0)
    if falls_back and all(f"<0x{byte:02X}>" in pieces for byte in range(256)):
        return longest
    each_its_own = kind == "BPE" and model.get("unk_token") is not None and not model.get("fuse_unk")
    return max(longest, _MAX_CHARACTER_BYTES) if each_its_own else None


def _shrinks_by(normalizer: Mapping[str, Any] | None) -> float | None:
    """Return how many bytes of text become one byte at most, or None where text may be deleted."""
    factor = 1.0
    for stage in _flat(normalizer, "normalizers"):
        kind = stage.get("type")
        if kind in {"NFC", "NFD", "NFKC", "NFKD"}:
            factor *= _NORMAL_FORM
        elif kind == "Replace":
            pattern, content = stage.get("pattern", {}).get("String"), stage.get("content")
            if not pattern or not content:
                return None
            factor *= max(1.0, len(pattern.encode()) / len(content.encode()))
        elif kind not in {"Prepend", "ByteLevel"}:
            return None
    return factor


def _keeps_all(stage: Mapping[str, Any]) -> bool:
    if stage.get("type") in {"Split", "Punctuation"}:
        return stage.get("behavior") != "Removed"
    return stage.get("type") in _KEEPS_ALL_TEXT


def _flat(part: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """Return the stages of a normalizer or pre-tokenizer, in order."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [stage for each in part.get(inner) or () for stage in _flat(each, inner)]
    return [part]
