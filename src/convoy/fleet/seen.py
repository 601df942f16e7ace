"""How much text an answer shows to whoever asked: what a provider may be paid for is bounded by it."""

from __future__ import annotations

import msgspec

MAX_LINE_BYTES = 1024 * 1024  # a longer line of a stream counts for nothing
# they are the same in every event, and no token of an answer
_NO_TEXT = frozenset({"role", "id", "type", "index", "finish_reason"})


class SeenText:
    """Counts the bytes of text in an answer as it passes. What makes no sense counts for nothing."""

    def __init__(self) -> None:
        self._line = bytearray()  # the last one, which has no end yet
        self.bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next piece of a stream of events.

        Each byte is looked at once, however small the pieces are: a provider chooses their size.
        """
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._keep(part)
            if self._line.startswith(b"data:") and len(self._line) <= MAX_LINE_BYTES:
                self.whole(bytes(memoryview(self._line)[5:]))
            self._line = bytearray()
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        """Add to the line. Of one that is too long no more is kept than shows that it is."""
        self._line += part[: MAX_LINE_BYTES + 1 - len(self._line)]

    def whole(self, data: bytes) -> None:
        """Take an answer that is no stream, or one event of a stream."""
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        choices = found.get("choices") if isinstance(found, dict) else None
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self.bytes += sum(_text_bytes(choice.get(name)) for name in ("delta", "message", "text"))


def _text_bytes(said: object) -> int:
    """Return the bytes of all text in there."""
    count, left = 0, [said]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one.encode())
        elif isinstance(one, dict):
            left += [value for name, value in one.items() if name not in _NO_TEXT]
        elif isinstance(one, list):
            left += one
    return count
