"""Build the answer of POST /v1/responses: events, or one response object."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Sequence
from functools import partial

import msgspec

from convoy.api.chat.reply import Ended, ReplyReader
from convoy.api.chat.usage import UsageCounter
from convoy.api.responses.output import OutputWriter
from convoy.api.responses.problem import error_of
from convoy.api.responses.shapes import (
    Event,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseCompleted,
    ResponseCreated,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseObject,
    ResponseUsage,
)
from convoy.api.responses.store import RESPONSE_PREFIX, ResponseStore, item_id
from convoy.api.responses.translate import ContextFailed, ResponsesRequest
from convoy.engine.outputs import Output, TokenOutput
from convoy.model.text.pieces import ReasoningPiece, TextPiece


class ResponsesAnswer:
    """Implement `ResponseBuilder` for this API."""

    def __init__(self, asked: ResponsesRequest, store: ResponseStore | None = None) -> None:
        """Begin the answer to ``asked``. ``store`` keeps it if the request says so."""
        self.counter = UsageCounter(asked, RESPONSE_PREFIX)
        self.end = b"data: [DONE]\n\n"
        self._asked = asked
        self._store = store
        self._reader = ReplyReader(asked)
        self._numbers = itertools.count()
        self._writer = OutputWriter(
            self._number,
            asked.sources,
            item_id=partial(item_id, self.counter.id),
            summarise=asked.summarise,
            encode=asked.encode,
        )
        self._shown = msgspec.structs.replace(
            asked.shown, id=self.counter.id, created_at=self.counter.created
        )
        self._ended: Ended | None = None
        # Whether the last text was reasoning.
        self._reasons = asked.reply.thinking
        self._reasoning_tokens = 0

    def opening(self) -> Sequence[Event]:
        created = ResponseCreated(response=self._shown, sequence_number=self._number())
        return [created, *self.keep_alive()]

    def keep_alive(self) -> Sequence[Event]:
        return [ResponseInProgress(response=self._shown, sequence_number=self._number())]

    def events(self, index: int, output: Output) -> Sequence[Event]:  # noqa: ARG002 - there is one request
        self.counter.count(output)
        events: list[Event] = []
        read = [piece for _, piece in self._reader.read(output)]
        for piece in read:
            if isinstance(piece, Ended):
                events += self._finish(piece)
            else:
                self._reasons = isinstance(piece, ReasoningPiece)
                events += self._writer.write(piece)
        # A token without a piece belongs to the text before it.
        if isinstance(output, TokenOutput) and self._reasons:
            self._reasoning_tokens += 1
        return events

    def closing(self) -> Sequence[Event]:
        final = self.whole()
        if final.status == "incomplete":
            return [ResponseIncomplete(response=final, sequence_number=self._number())]
        return [ResponseCompleted(response=final, sequence_number=self._number())]

    def failure(self, error: BaseException) -> Sequence[Event]:
        failed = msgspec.structs.replace(
            self._shown, status="failed", error=error_of(error), output=tuple(self._writer.items)
        )
        return [ResponseFailed(response=failed, sequence_number=self._number())]

    def add(self, index: int, output: Output) -> None:
        self.events(index, output)

    def whole(self) -> ResponseObject:
        """Return the complete response, and keep it if it is to be stored."""
        assert self._ended is not None, "the answer is complete"
        cut = self._ended.reason == "length"
        final = msgspec.structs.replace(
            self._shown,
            status="incomplete" if cut else "completed",
            incomplete_details=IncompleteDetails() if cut else None,
            completed_at=None if cut else int(time.time()),
            output=tuple(self._writer.items),
            usage=self._usage(),
        )
        if self._store is not None and final.store:
            turns = (*self._asked.turns, self._writer.turn)
            self._store.keep(self._asked.key, self._asked.owner, final.id, msgspec.json.encode(final), turns)
        return final

    def _finish(self, ended: Ended) -> list[Event]:
        self._ended = ended
        # A client expects an item, also if the model says nothing.
        events = [] if self._writer.began else self._writer.write(TextPiece(""))
        return [*events, *self._writer.close("incomplete" if ended.reason == "length" else "completed")]

    def _usage(self) -> ResponseUsage:
        prompt, answer = self._asked.num_prompt_tokens, self.counter.completion_tokens
        return ResponseUsage(
            prompt,
            InputTokensDetails(self.counter.cached_tokens),
            answer,
            OutputTokensDetails(self._reasoning_tokens),
            prompt + answer,
        )

    def _number(self) -> int:
        return next(self._numbers)


def refusal_events(error: ContextFailed) -> list[Event]:
    """Return the whole stream of a request that is refused."""
    new_id = f"{RESPONSE_PREFIX}{secrets.token_hex(12)}"
    shown = msgspec.structs.replace(error.shown, id=new_id, created_at=int(time.time()))
    failed = msgspec.structs.replace(shown, status="failed", error=error_of(error))
    return [
        ResponseCreated(response=shown, sequence_number=0),
        ResponseFailed(response=failed, sequence_number=1),
    ]
