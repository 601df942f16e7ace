"""Serve an endpoint that generates: read, translate, submit, and answer as a stream or as one body."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from convoy.api.body.intake import Intake, Upload, most_body_bytes
from convoy.api.body.read_body import read_body
from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.resume import LAST_EVENT_ID, EventSink, KeptStreams, asks_to_resume
from convoy.api.chat.usage import ResponseBuilder
from convoy.api.engine_stream import Batch, EngineStream, LoopWaker
from convoy.api.exchange import Exchange
from convoy.api.keys.key_use import RequestUse
from convoy.api.keys.keys import Caller
from convoy.api.keys.repeats import Repeats
from convoy.api.lifecycle import Lifecycle
from convoy.api.listen.options import ServeOptions
from convoy.api.service import Service
from convoy.api.traces import FIRST_S, INPUT_TOKENS, MAX_TOKENS, OUTPUT_TOKENS, STREAM, TraceSpan
from convoy.engine.outputs import ErrorOutput, FinishOutput
from convoy.engine.requests.admission import check_for_model
from convoy.errors import ConvoyError, Unavailable

_log = logging.getLogger(__name__)

Body = TypeVar("Body")
Asked = TypeVar("Asked", bound=ParsedRequest)


# Sends the outputs of a generation as its answer.
_Send = Callable[[EngineStream, ResponseBuilder], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Work(Generic[Asked]):
    """Hold a request that may run. Times are in seconds; ``began_s`` is monotonic."""

    asked: Asked
    use: RequestUse
    # The trace that it belongs to.
    parent: str
    began_s: float
    read_s: float


@dataclass(frozen=True, slots=True)
class Generate(Generic[Body, Asked]):
    """Serve one endpoint of any API as an ASGI application.

    ``kind`` names the endpoint in traces: completion or embeddings for plain prompts, any other for a
    conversation.
    `guard.Guard` turns its exceptions into an answer as long as nothing has been sent.
    """

    service: Service
    options: ServeOptions
    lifecycle: Lifecycle
    intake: Intake
    repeats: Repeats
    streams: KeptStreams
    waker: LoopWaker
    kind: str
    decode: Callable[[bytes], Body]
    translate: Callable[[Body, Service, ServeOptions, bytes], Asked]
    answer: Callable[[Asked], ResponseBuilder]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - the exchange sends
        exchange: Exchange = scope["convoy.exchange"]
        caller: Caller = scope["convoy.caller"]
        headers = Headers(scope=scope)
        # Lines of JSON have no ids.
        last_id = None if exchange.sends_lines else headers.get(LAST_EVENT_ID)
        if last_id is not None:
            stream, number = self.streams.find(caller.salt, self.kind, last_id)
            # The work of the stream counts as an answer, too, but it may end before the stream is attached.
            with self.lifecycle.answering(admitted=True):
                await exchange.while_connected(stream.send_to(exchange, number))
            return
        is_kept = asks_to_resume(headers) and not exchange.sends_lines
        with ExitStack() as held:
            held.enter_context(self.lifecycle.answering())
            use = held.enter_context(caller.use.begin())
            chat = self.kind not in {"completion", "embeddings"}
            max_bytes = most_body_bytes(self.service.models, self.options, chat=chat)
            upload = self.intake.upload(caller.name)
            try:
                data = await read_body(headers, receive, self.options, upload=upload, max_bytes=max_bytes)
                mark = self.repeats.check(caller.name, self.kind, data)
                upload.keep(data)
                # `upload` holds the body now. A second reference would outlive the place of a long body.
                del data
                with self.repeats.noting(mark):
                    read = self._read(upload, headers.get("traceparent", ""), caller, use)
                    work = await exchange.while_connected(read)
                    if is_kept and work.asked.stream:
                        stream = self.streams.open(caller.salt, self.kind, exchange)
                        send_events = partial(self._stream, stream)
                        stream.begin(self._run(work, stream, send_events), held.pop_all())
                        await exchange.while_connected(stream.send_to(exchange))
                        return
                    answer = self._stream if work.asked.stream else self._whole
                    await exchange.while_connected(self._run(work, exchange, partial(answer, exchange)))
            finally:
                upload.leave()

    async def _read(self, upload: Upload, parent: str, caller: Caller, use: RequestUse) -> _Work[Asked]:
        began_s = time.monotonic()
        asked = await self.intake.read(upload, partial(self._prepare, salt=caller.salt))
        read_s = time.monotonic() - began_s
        # Hold the worst case before anything runs, so that a refusal costs no engine time.
        use.hold(asked.num_prompt_tokens, asked.most_tokens)
        return _Work(asked, use, parent, began_s, read_s)

    async def _run(self, work: _Work[Asked], sink: EventSink, send: _Send) -> None:
        asked, use = work.asked, work.use
        answer = self.answer(asked)
        generation = EngineStream(asked.model.engine, asked.requests, self.waker)
        span = self.options.traces.begin(self.kind, asked.model.name, work.parent, work.read_s)
        try:
            with self.lifecycle.running(generation):
                # A holder of a key unloads no model that the operator keeps for all.
                may_shorten = self.options.keys is None
                held = self.service.hold(asked.model, asked.keep_alive_s, may_shorten=may_shorten)
                if not asked.requests and asked.keep_alive_s == 0:
                    # A model that is held would be loaded again if another one took its place.
                    held = self.service.unload(asked.model)
                asked_s = time.monotonic()
                async with held, generation:
                    answer.counter.load_s = time.monotonic() - asked_s
                    use.used(asked.num_prompt_tokens, 0, 0)
                    await send(generation, answer)
            sink.outcome = sink.outcome or "complete"
        except BaseException as error:
            gone = isinstance(error, asyncio.CancelledError)
            sink.outcome = "client gone" if gone else type(error).__name__
            raise
        finally:
            _settle(use, answer)
            _report(sink, answer, work.began_s)
            if self.options.traces.is_on:
                _end_span(span, sink, answer, work.began_s, work.read_s)

    def _prepare(self, data: bytes, *, salt: bytes) -> Asked:
        asked = self.translate(self.decode(data), self.service, self.options, salt)
        model = asked.model
        if not self.service.is_loaded(model):
            # The engine would refuse it after the load.
            check = partial(check_for_model, vocab_size=model.tokenizer.vocab_size)
            for request in asked.requests:
                check(request, eos_ids=model.tokenizer.eos_ids, max_context=model.max_context)
        return asked

    async def _whole(self, exchange: Exchange, generation: EngineStream, answer: ResponseBuilder) -> None:
        async for batch in generation.batches(self.options.heartbeat_s):
            _raise_error(batch)
            for index, output in batch:
                answer.add(index, output)
        # A scored prompt has thousands of tokens to spell out, which would block the event loop.
        body = await self.intake.short.run(answer.whole)
        await exchange.send_json(200, body)

    async def _stream(self, sink: EventSink, generation: EngineStream, answer: ResponseBuilder) -> None:
        try:
            async for batch in generation.batches(self.options.heartbeat_s):
                _raise_error(batch)
                # Send the headers only now: an error before the first output still gets its own HTTP status.
                if not sink.status:
                    sink.failure = answer.failure
                    await sink.start_events()
                    await sink.send_events(answer.opening())
                    generation.sent()
                events = [event for index, output in batch for event in answer.events(index, output)]
                events = events if batch else [*answer.keep_alive()]
                await sink.send_events(events, b"" if batch or events else b": still here\n\n")
                if events:
                    generation.sent()
        except ConvoyError as error:
            if not sink.status:
                raise
            # Send neither a finish reason nor the end: a broken answer must not look like a complete one.
            sink.outcome = type(error).__name__
            await sink.send_events(answer.failure(error))
            await sink.end_events()
            return
        if not sink.status:
            # The model was only loaded.
            await sink.start_events()
        await sink.send_events(answer.closing(), answer.end)
        await sink.end_events()


def _raise_error(batch: Batch) -> None:
    for _, output in batch:
        if isinstance(output, ErrorOutput):
            raise output.error
        if isinstance(output, FinishOutput) and output.reason == "abort":
            text = "the request was aborted before the answer was complete"
            raise Unavailable(text, public=text)


def _settle(use: RequestUse, answer: ResponseBuilder) -> None:
    """Record the tokens of an answer, also of a broken one. A request that never ran used no tokens."""
    counter = answer.counter
    if counter.first_token_s is not None:
        use.used(counter.asked.num_prompt_tokens, counter.cached_tokens, counter.completion_tokens)


def _report(sink: EventSink, answer: ResponseBuilder, began_s: float) -> None:
    """Log one line per generation: counts and times, no text and no token ids."""
    counter, now_s = answer.counter, time.monotonic()
    first_s = f"{counter.first_token_s - began_s:.3f}" if counter.first_token_s is not None else "-"
    _log.info(
        "generation request=%s key=%s outcome=%s prompts=%d choices=%d prompt_tokens=%d "
        "completion_tokens=%d first_s=%s total_s=%.3f",
        sink.id,
        sink.caller or "-",
        sink.outcome,
        len(counter.asked.requests),
        counter.num_choices,
        counter.asked.num_prompt_tokens,
        counter.completion_tokens,
        first_s,
        now_s - began_s,
    )


def _end_span(
    span: TraceSpan, sink: EventSink, answer: ResponseBuilder, began_s: float, read_s: float
) -> None:
    """Record the span's parts and end it.

    The parts are: read (the body into tokens), queue (waiting for a step), prefill (to the first token) and
    decode.
    """
    counter, end_s = answer.counter, time.monotonic() - began_s
    asked = counter.asked
    span.note({"convoy.request.id": sink.id, STREAM: asked.stream, "convoy.choices": counter.num_choices})
    span.note({MAX_TOKENS: sum(one.max_tokens * one.num_choices for one in asked.requests)})
    span.note({INPUT_TOKENS: asked.num_prompt_tokens, OUTPUT_TOKENS: counter.completion_tokens})
    span.part("read", 0.0, read_s)
    if counter.first_token_s is not None:
        first_s = counter.first_token_s - began_s
        span.note({FIRST_S: first_s})
        queued_s = min(first_s, read_s + counter.queued_s)
        span.part("queue", read_s, queued_s)
        span.part("prefill", queued_s, first_s)
        span.part("decode", first_s, end_s)
    span.end(sink.outcome)
