"""Convert tokens to text as they arrive, and find stop strings across token boundaries.

Neither a stop string is shown, nor any suffix of the text that may still become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from convoy.errors import RequestError

_REPLACEMENT = "\ufffd"
# bytes of an incomplete character, which lacks at least its last byte
_MAX_PARTIAL = 3
# tokens without a whole character, after which they are taken for garbage and shown as such
_MAX_HELD = 64


class StopFilter:
    """Pass text on, up to the first stop string.

    The match that is complete first wins; of matches complete at the same character, the longest. The way the
    text was cut into deltas therefore never changes the text shown.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise RequestError("stop holds an empty string", param="stop")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, may_stop: bool = True) -> str:
        """Take more text and return the text that may be shown now. Returns "" once a stop string matched.

        If not ``may_stop``, a stop string that ends in ``delta`` does not count.
        """
        if self.matched is not None:
            return ""
        text = self._held + delta
        found = self._first_match(text, len(self._held)) if may_stop else None
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        kept = self._open_suffix(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def finish(self) -> str:
        """Return the text still held back, as no more text follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """Return start and string of the first match that ends behind the ``old`` first characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = text.find(stop, max(0, old - len(stop) + 1))
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[1], best[2])

    def _open_suffix(self, text: str) -> int:
        """Return the length of the longest suffix of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - length :]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0


class Decoder(Protocol):
    """Specify the part of a tokeniser that `TextStream` needs."""

    def decode(self, ids: Sequence[int], /) -> str:
        """Return the text of ``ids``."""


class TextStream:
    """Convert one choice's tokens to text as they arrive: whole characters only, and no part of a stop
    string.

    Decoding is incremental by two offsets, as in vLLM and TGI. Tokens since the last whole character are
    decoded together with those just before them, and the text of the latter is cut off. A tokeniser may
    therefore treat the first token of a text differently.
    """

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._filter = StopFilter(stop)
        # the tokens of the last delta, then those after it
        self._ids: list[int] = []
        # the number of leading tokens that serve only as context
        self._num_context = 0
        # characters of the tokens' text that were already passed on
        self._shown = 0

    @property
    def stopped(self) -> bool:
        """Tell whether a stop string matched; no text follows then."""
        return self._filter.matched is not None

    @property
    def matched_stop(self) -> str | None:
        """Return the stop string that matched, or None."""
        return self._filter.matched

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Take the next token and return the text that may be shown now, often "".

        If not ``may_stop``, a stop string that this token completes does not count.
        """
        self._ids.append(token_id)
        text = self._tokenizer.decode(self._ids)
        whole = text.rstrip(_REPLACEMENT)
        # a trailing U+FFFD may be the start of a character that the next tokens complete
        stable = len(whole)
        if len(self._ids) > _MAX_HELD:
            stable = max(stable, len(text) - _MAX_PARTIAL)
        if stable <= self._shown:
            return ""
        delta = text[self._shown : stable]
        self._shown = stable
        if stable == len(text):
            self._forget()
        return self._filter.push(delta, may_stop=may_stop)

    def finish(self) -> str:
        """Return the text still held back, as no tokens follow; an incomplete character becomes U+FFFD."""
        rest = self._tokenizer.decode(self._ids)[self._shown :]
        self._ids.clear()
        self._num_context = self._shown = 0
        return self._filter.push(rest) + self._filter.finish()

    def _forget(self) -> None:
        del self._ids[: self._num_context]
        self._num_context = len(self._ids)
        self._shown = len(self._tokenizer.decode(self._ids))


class NoText:
    """Stand for a `TextStream` where another process spells the tokens: without text and stop strings."""

    stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:  # noqa: ARG002
        """Return no text for a token."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""
