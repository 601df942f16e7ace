"""Read the token counts in an upstream's answer: the tokens that it gave, and those that it read."""

from __future__ import annotations

from typing import Any

import msgspec

from convoy.errors import ProviderError

MAX_EVENT_BYTES = 1024 * 1024
_DONE = b"[DONE]"
# The fields of an answer's usage that make each count: OpenAI's, then those of the Messages API.
_COUNTS = {
    "prompt_tokens": (
        *("prompt_tokens", "input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"),
    ),
    "completion_tokens": ("completion_tokens", "output_tokens"),
}


class EventReader:
    """Read an answer as it passes. ``keep_usage``: the client wants the event with the counts."""

    def __init__(self, *, stream: bool, keep_usage: bool = True) -> None:
        self._stream = stream
        self._keep_usage = keep_usage
        self._rest = b""
        # The tokens seen so far.
        self.tokens = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        # The upstream said that the answer is complete.
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """Return the complete events so far, as they are to be passed on. Raises `ProviderError`."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ProviderError(f"an event of the upstream has more than {MAX_EVENT_BYTES} bytes")
        kept = [event for event in events if self._event(event)]
        return b"".join(event + b"\n\n" for event in kept)

    def whole(self, data: bytes) -> None:
        """Read an answer that is not streamed."""
        self._count(_object(data))
        self.tokens = max(1, self.completion_tokens)
        self.ended = True

    def _event(self, event: bytes) -> bool:
        """Return whether to pass the event on."""
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        if not lines:
            return bool(event.strip())
        data = b"\n".join(lines)
        if data == _DONE:
            self.ended = True
            return True
        found = _object(data)
        if found.get("error") is not None:
            raise ProviderError("the upstream broke off with an error")
        self._count(found)
        if isinstance(found.get("type"), str):
            self._named(found)
            return True
        choices = found.get("choices")
        if isinstance(choices, list) and choices:
            self.tokens += sum(_says_something(choice) for choice in choices)
            return True
        return self._keep_usage or not found.get("usage")

    def _named(self, found: dict[str, Any]) -> None:
        """Count an event of the Messages API, each of which has a type."""
        match found["type"]:
            case "message_start" if isinstance(found.get("message"), dict):
                self._count(found["message"])
            case "content_block_delta":
                delta = found.get("delta")
                kind = delta.get("type") if isinstance(delta, dict) else None
                self.tokens += kind != "signature_delta"
            case "message_stop":
                self.ended = True

    def _count(self, found: dict[str, Any]) -> None:
        usage = found.get("usage")
        if isinstance(usage, dict):
            for name, parts in _COUNTS.items():
                values = [value for part in parts if (value := usage.get(part)) is not None]
                if values and all(isinstance(value, int) and 0 <= value <= 1 << 40 for value in values):
                    setattr(self, name, sum(values))


def _says_something(choice: object) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    # Tool calls, refusals and reasoning under any name are all tokens.
    if isinstance(delta, dict):
        return any(value for name, value in delta.items() if name != "role")
    return bool(choice.get("text"))


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProviderError("the upstream answers something that is not JSON") from None
    if not isinstance(found, dict):
        raise ProviderError("the upstream answers JSON that is no object")
    return found
