"""A tokenizer that maps token n to one letter, for tests that care about tokens and not about text."""

from __future__ import annotations

from collections.abc import Sequence

from support.fake_executor import VOCAB

EOS = 11


class FakeTokenizer:
    """Provide the part of `convoy.model.text.tokens.Tokenizer` that the engine uses."""

    vocab_size = VOCAB
    eos_ids = frozenset({EOS})

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(ord("0") + token) for token in ids)
