"""Single tokens as clients see them beside their log-probabilities: text where they are text, bytes where
they are not.
"""

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

# JSON has no infinity; OpenAI's stand-in for "very unlikely".
_LEAST = -9999.0


class TokenText:
    """The bytes and text of tokens, looked up once each."""

    def __init__(self, tokenizer: ServedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._shown: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, which need not be a whole character."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._tokenizer.token_bytes(token_id)
        return known

    def shown_bytes(self, token_id: int) -> bytes:
        """What the token adds to the text: nothing, for a special one."""
        known = self._shown.get(token_id)
        if known is None:
            known = self.bytes_of(token_id) if self._tokenizer.decode([token_id]) else b""
            self._shown[token_id] = known
        return known

    def text_of(self, token_id: int) -> str:
        r"""The token as text, or ``bytes:\xe2\x82`` for a part of a character."""
        piece = self.bytes_of(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)

    def chat_logprob(self, logprob: TokenLogprob) -> ChatTokenLogprob:
        """One token of a chat answer."""
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
    """Log-probabilities of one choice's text, with the offset of each token in characters."""

    def __init__(self, pieces: TokenText) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, tokens: list[tuple[int, TokenLogprob | None]]) -> TextLogprobs:
        """The next tokens; None for the first of a prompt."""
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
        # Best first: where two tokens have the same text, the likelier one stands. The token itself is always
        # there.
        for token_id, value in [*logprob.top, (logprob.token_id, logprob.logprob)]:
            top.setdefault(self._pieces.text_of(token_id), max(value, _LEAST))
        return top
