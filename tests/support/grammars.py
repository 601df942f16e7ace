"""Grammars for tests, over small vocabularies."""

from __future__ import annotations

import json
from collections.abc import Set as SetOf
from typing import Any

import numpy as np

from convoy.model.constraints.compiler import GrammarCompiler, GrammarLimits
from convoy.model.constraints.matcher import CompiledGrammar, MaskFiller
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import sample
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
    """Compile for `ByteVocabulary`, within a minute unless ``limits`` say otherwise."""
    limits = limits or GrammarLimits(deadline_s=60)
    return GrammarCompiler(ByteVocabulary(), limits).compile(grammar(kind, text, strict=strict), "grammar")


def grammar(kind: GrammarKind, text: Any = "", *, strict: bool = True) -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text), strict)


def draw_answer(grammar: CompiledGrammar, seed: int, max_tokens: int) -> tuple[str, bool]:
    """Draw from random logits that favour closing tokens; return the text, and whether it is whole."""
    random, filler, matcher = np.random.default_rng(seed), MaskFiller(), grammar.matcher()
    closing = [256, *b'"]}', *(258 + ByteVocabulary.WORDS.index(word) for word in ("}", "]"))]
    text = b""
    for position in range(max_tokens):
        logits = random.standard_normal(ByteVocabulary.vocab_size).astype(np.float32)
        # Most tokens are bytes of letters beyond ASCII, and a text of these alone says little.
        logits[128:256] -= 3
        logits[closing] += 4
        filler.fill([(matcher, ())])
        token = sample(
            logits,
            SamplingParams(seed=seed),
            choice=0,
            position=position,
            prompt_ids=(),
            generated_ids=(),
            mask=matcher.masks[0],
        ).token_id
        if token == 256:
            return text.decode(), True
        assert matcher.consume(token)
        text += ByteVocabulary().token_bytes(token)
        if matcher.complete:
            return text.decode(), True
    return text.decode(errors="ignore"), False


def letters(pattern: str, limits: GrammarLimits | None = None) -> CompiledGrammar:
    """Compile a regular expression for the tokens of `support.fake_executor`."""
    return GrammarCompiler(LetterVocabulary(), limits).compile(Grammar("regex", pattern), "regex")
