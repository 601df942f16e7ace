"""Find stop strings across token boundaries.

Neither a stop string is shown, nor any suffix of the text that may still become one.
"""

from __future__ import annotations

from collections.abc import Sequence

from convoy.errors import RequestError


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
