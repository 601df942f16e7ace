"""Count the text that an answer shows to the client. It bounds the provider's bill."""

from __future__ import annotations

import msgspec

from convoy.fleet.apis.table import APIS
from convoy.wire.fleet.messages import Kind

# A longer line of a stream counts for nothing.
MAX_LINE_BYTES = 1024 * 1024
# These are the same in every event, and no token of an answer.
_NO_TEXT = frozenset({"role", "id", "type", "index", "finish_reason", "signature", "stop_reason"})


class AnswerText:
    """Count the bytes of text in an answer as it passes. Invalid data counts for nothing."""

    def __init__(self, kind: Kind) -> None:
        """Count from nothing. ``kind`` tells which fields a client shows."""
        self._read = APIS[kind].read
        # The last line, which has no end yet.
        self._line = bytearray()
        self.bytes = 0

    def feed(self, data: bytes) -> None:
        """Take the next piece of a stream of events.

        Each byte is read once, however small the pieces are, because a provider chooses their size.
        """
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._keep(part)
            if self._line.startswith(b"data:") and len(self._line) <= MAX_LINE_BYTES:
                self.whole(bytes(memoryview(self._line)[5:]))
            self._line = bytearray()
        self._keep(rest)

    def _keep(self, part: bytes) -> None:
        """Append to the line. A line that is too long is kept only up to one byte over the limit."""
        self._line += part[: MAX_LINE_BYTES + 1 - len(self._line)]

    def whole(self, data: bytes) -> None:
        """Take an answer that is not streamed, or one event of a stream."""
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if isinstance(found, dict):
            self.bytes += sum(map(_text_bytes, self._read(found).texts))


def _text_bytes(said: object) -> int:
    """Return the bytes of all text inside ``said``."""
    count, left = 0, [said]
    while left:
        one = left.pop()
        if isinstance(one, str):
            count += len(one.encode())
        elif isinstance(one, dict):
            # A call's input is an object; OpenAI's form has it as text already.
            if isinstance(given := one.get("input"), dict):
                count += len(msgspec.json.encode(given))
            left += [value for name, value in one.items() if name not in _NO_TEXT and name != "input"]
        elif isinstance(one, list):
            left += one
    return count
