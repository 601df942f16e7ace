"""Grammars for tests, over small vocabularies."""

from __future__ import annotations

import json
from collections.abc import Set as SetOf
from typing import Any

from convoy.model.constraints.compiler import GrammarCompiler, GrammarLimits
from convoy.model.constraints.matcher import CompiledGrammar
from convoy.model.text.grammar import Grammar, GrammarKind
from support.fake_executor import VOCAB
from support.fake_tokenizer import EOS


class LetterVocabulary:
    """Map token n to one character, as `support.fake_tokenizer` does."""

    vocab_size = VOCAB
    eos_ids: SetOf[int] = frozenset({EOS})
    control_ids: SetOf[int] = frozenset()

    def token_bytes(self, token_id: int) -> bytes:
        return chr(ord("0") + token_id).encode()

    def encode_letters(self, text: str) -> list[int]:
        return [ord(letter) - ord("0") for letter in text]


class ByteVocabulary:
    """Map tokens 0 to 255 to bytes, then the end of text, a control token and some words."""

    WORDS = ('{"', '": ', '", "', "true", "name", "}", "]", "ab", "12")
    eos_ids: SetOf[int] = frozenset({256})
    control_ids: SetOf[int] = frozenset({256, 257})
    vocab_size = 258 + len(WORDS)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return self.WORDS[token_id - 258].encode() if token_id > 257 else b"<|control|>"

    def encode_letters(self, text: str) -> list[int]:
        return list(text.encode())


def compiled(
    kind: GrammarKind, text: Any = "", *, strict: bool = True, limits: GrammarLimits | None = None
) -> CompiledGrammar:
    """Compile for `ByteVocabulary`."""
    return GrammarCompiler(ByteVocabulary(), limits).compile(grammar(kind, text, strict=strict), "grammar")


def grammar(kind: GrammarKind, text: Any = "", *, strict: bool = True) -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text), strict)


def letters(pattern: str) -> CompiledGrammar:
    """Compile a regular expression for the tokens of `support.fake_executor`."""
    return GrammarCompiler(LetterVocabulary()).compile(Grammar("regex", pattern), "regex")
