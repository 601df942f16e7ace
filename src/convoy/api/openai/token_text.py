"""Show single tokens beside their log-probabilities: as text, or as bytes if they are not text."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from convoy.api.openai.answers import (
    ChatTokenLogprob,
    PromptLogprob,
    PromptLogprobs,
    TextLogprobs,
    TopLogprob,
)
from convoy.api.service import ServedTokenizer
from convoy.engine.outputs import TokenLogprob

# JSON has no infinity. OpenAI writes this number for "very unlikely".
_LEAST = -9999.0


class TokenText:
    """Look up the bytes and text of tokens, once for each token."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes, which need not be a whole character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._tokenizer.token_bytes(token_id)
        return known

    def shown_bytes(self, token_id: int) -> bytes:
        """Return the bytes that the token adds to the text; a special token adds none."""
        known = self._shown.get(token_id)
        if known is None:
            known = self.bytes_of(token_id) if self._tokenizer.decode([token_id]) else b""
            self._shown[token_id] = known
        return known

    def text_of(self, token_id: int) -> str:
        r"""Return the token as text, or ``bytes:\xe2\x82`` for a part of a character."""
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def chat_logprob(self, logprob: TokenLogprob) -> ChatTokenLogprob:
        """Return one token of a chat answer with its alternatives."""
        return ChatTokenLogprob(
            self.text_of(logprob.token_id),
            max(logprob.logprob, _LEAST),
            list(self.bytes_of(logprob.token_id)),
            [TopLogprob(self.text_of(i), max(p, _LEAST), list(self.bytes_of(i))) for i, p in logprob.top],
        )

    def prompt_logprobs(self, scored: Sequence[TokenLogprob | None], num_top: int) -> PromptLogprobs:
        """Return each token of a prompt with its ``num_top`` best alternatives."""
        return [None if one is None else self._ranked(one, num_top) for one in scored]

    def _ranked(self, scored: TokenLogprob, num_top: int) -> dict[int, PromptLogprob]:
        ranked = [(scored.token_id, scored.logprob, scored.rank)]
        ranked += [(token_id, value, rank) for rank, (token_id, value) in enumerate(scored.top[:num_top], 1)]
        return {
            token_id: PromptLogprob(max(value, _LEAST), rank, self.text_of(token_id))
            for token_id, value, rank in ranked
        }


class TextLogprobWriter:
    """Write the log-probabilities of one choice's text, with the offset of each token in characters."""

    def __init__(self, pieces: TokenText) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, tokens: list[tuple[int, TokenLogprob | None]]) -> TextLogprobs:
        """Return the entries of the next tokens. A prompt's first token has None as its log-probability."""
        written = TextLogprobs([], [], [], [])
        for token_id, logprob in tokens:
            written.tokens.append(self._pieces.text_of(token_id))
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._pieces.shown_bytes(token_id)))
            written.token_logprobs.append(None if logprob is None else max(logprob.logprob, _LEAST))
            written.top_logprobs.append(None if logprob is None else self._top(logprob))
        return written

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        # Best first: if two tokens have the same text, the likelier one is kept. The chosen token is always
        # listed.
        for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
            top.setdefault(self._pieces.text_of(token_id), max(value, _LEAST))
        return top
