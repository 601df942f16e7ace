"""A vocabulary of bytes, the end of text and the marks of a format."""

from __future__ import annotations

from convoy.model.text.formats.registry import FormatRow

EOS = 256


class ByteMarks:
    """Map tokens 0 to 255 to bytes, then the end of text and the marks of a format."""

    def __init__(self, row: FormatRow, *, spelled: bool) -> None:
        self.tokens = {} if spelled else {mark: EOS + 1 + index for index, mark in enumerate(row.marks)}
        self._names = {number: mark for mark, number in self.tokens.items()}
        self.vocab_size = EOS + 1 + len(self.tokens)
        self.eos_ids = frozenset({EOS})
        self.control_ids = frozenset({EOS, *self._names})

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < EOS else self._names.get(token_id, "</s>").encode()

    def encode_letters(self, text: str) -> list[int]:
        return list(text.encode())
