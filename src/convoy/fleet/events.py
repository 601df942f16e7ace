"""Read the token counts in an upstream's answer: the tokens that it gave, and those that it read."""

from __future__ import annotations

from typing import Any

import msgspec

from convoy.api.keys.repeats import CONTEXT_ERROR
from convoy.errors import ProviderError, RequestError
from convoy.fleet.answer import is_too_long
from convoy.fleet.apis.table import APIS
from convoy.wire.fleet.messages import Kind

MAX_EVENT_BYTES = 1024 * 1024
_DONE = b"[DONE]"
# Characters of an upstream's error that a client may read.
_MAX_MESSAGE = 1000
# The Messages API's counts of a prompt are apart. The Responses API has the first of them, for all.
_PROMPT_PARTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
# A chat's count of the answer, and the one of both other APIs.
_GIVEN = ("completion_tokens", "output_tokens")
_MAX_COUNT = 1 << 40


class EventReader:
    """Read an answer as it passes.

    ``keep_usage``: the client wants the event with the counts. ``more_bytes`` is how far an event may exceed
    its limit, because events of some APIs repeat the request.
    """

    def __init__(self, kind: Kind, *, stream: bool, keep_usage: bool = True, more_bytes: int = 0) -> None:
        self._read = APIS[kind].read
        self._stream = stream
        self._keep_usage = keep_usage
        self.max_event_bytes = MAX_EVENT_BYTES + more_bytes
        self._rest = b""
        self._was_silent = False
        # The tokens seen so far.
        self.tokens = 0
        self.prompt_tokens = 0
        self.completion_tokens = 0
        # The upstream said that the answer is complete.
        self.ended = False
        # The upstream said in its stream, before any token, that the prompt does not fit.
        self.refusal: RequestError | None = None

    def feed(self, data: bytes) -> bytes:
        """Return the complete events so far, as they are to be passed on. Raises `ProviderError`."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > self.max_event_bytes:
            raise ProviderError(f"an event of the upstream has more than {self.max_event_bytes} bytes")
        kept = [event for event in events if self._event(event)]
        return b"".join(event + b"\n\n" for event in kept)

    def whole(self, data: bytes) -> None:
        """Read an answer that is not streamed."""
        self._count(self._read(_object(data)).usage)
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
        facts = self._read(_object(data))
        if facts.error is not None:
            self._break(facts.error)
            return False
        self._count(facts.usage)
        self.tokens += facts.tokens
        self.ended = self.ended or facts.ended
        if facts.silent and not self.tokens:
            # The relays before the client make their own, and hold these back.
            self._was_silent, again = True, self._was_silent
            return not again
        return self._keep_usage or not facts.only_usage

    def _break(self, error: object) -> None:
        """Keep an error that refuses the request. Raises `ProviderError` for any other one."""
        if self.tokens or not is_too_long(msgspec.json.encode({"error": error})):
            raise ProviderError("the upstream broke off with an error")
        message = error.get("message") if isinstance(error, dict) else None
        text = message if isinstance(message, str) else "the prompt does not fit the context"
        self.refusal = RequestError(text[:_MAX_MESSAGE], code=CONTEXT_ERROR)

    def _count(self, usage: object) -> None:
        if not isinstance(usage, dict):
            return
        if (whole := usage.get("prompt_tokens")) is not None:
            # Some engines tell beside it how many of these tokens were cached.
            if _is_count(whole):
                self.prompt_tokens = whole
        else:
            parts = [value for name in _PROMPT_PARTS if (value := usage.get(name)) is not None]
            if all(map(_is_count, parts)):
                # The usage at the end of a stream may leave out the cached tokens that the start told.
                self.prompt_tokens = max(self.prompt_tokens, sum(parts))
        given = [value for name in _GIVEN if (value := usage.get(name)) is not None]
        if given and _is_count(given[0]):
            self.completion_tokens = given[0]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and 0 <= value <= _MAX_COUNT


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise ProviderError("the upstream answers something that is not JSON") from None
    if not isinstance(found, dict):
        raise ProviderError("the upstream answers JSON that is no object")
    return found
