"""Stop strings: found across token boundaries, never shown, nor any part of one that may still come true."""

from __future__ import annotations

from collections.abc import Sequence

from convoy.errors import RequestError


class StopFilter:
    """Passes text on, up to the first stop string.

    The match that is complete first wins; of those complete at the same character, the longest. So how
    the text was cut into deltas never changes what is shown.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if not all(stop):
            raise RequestError("stop holds an empty string", param="stop")
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, may_stop: bool = True) -> str:
        """Take more text and return what may be shown now. Empty once a stop string matched.

        Where it may not stop, a stop string that ends in ``delta`` does not count.
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
        """No more text comes: returns what was held back."""
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
        """Length of the longest end of ``text`` that begins a stop string."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[len(text) - length :]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0
