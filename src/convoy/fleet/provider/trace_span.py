"""Trace one answer of a provider from the messages that it sends: when, how much, and how it ended.

It is apart from the connection because tracing decides nothing, and only watches the messages that pass.
"""

from __future__ import annotations

import time

from convoy.api.traces import FIRST_S, INPUT_TOKENS, MAX_TOKENS, OUTPUT_TOKENS, Traces
from convoy.fleet.provider.provided import Send
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed, FleetMessage, Serve


class AnswerSpan:
    """Note an answer's messages on their way to the socket.

    ``is_offered``: the model's name is one that this provider offers.
    """

    def __init__(self, traces: Traces, serve: Serve, send: Send, *, is_offered: bool) -> None:
        self._send = send
        self._began_s = time.perf_counter()
        self._asked_s = 0.0
        self._first_s = 0.0
        self._span = traces.begin(serve.kind, serve.model if is_offered else "", serve.trace)
        self._span.note({"convoy.request.id": serve.request_id, MAX_TOKENS: serve.max_tokens})
        self.traceparent = self._span.traceparent

    async def send(self, message: FleetMessage) -> None:
        """Note the message, and send it on."""
        self._note(message)
        await self._send(message)

    def end(self) -> None:
        """End the span of an answer that ended without a last message."""
        self._span.end("client gone")

    def _note(self, message: FleetMessage) -> None:
        now_s = time.perf_counter() - self._began_s
        match message:
            case Began():
                self._asked_s = now_s
                self._span.part("engine", 0.0, now_s)
            case Chunk(tokens=tokens) if tokens and not self._first_s:
                self._first_s = now_s
                self._span.part("first_token", self._asked_s, now_s)
            case Done(prompt_tokens=prompt, completion_tokens=completion):
                if self._first_s:
                    self._span.part("decode", self._first_s, now_s)
                    self._span.note({FIRST_S: self._first_s})
                self._span.note({INPUT_TOKENS: prompt, OUTPUT_TOKENS: completion})
                self._span.end("complete")
            case Failed(full=full, refused=refused):
                self._span.end("full" if full else "SealedBodyRefused" if refused else "ProviderFailed")
            case _:
                return
