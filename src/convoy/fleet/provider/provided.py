"""Answer one request at a provider: open it, ask the engine, and seal the answer piece by piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import TypeVar

import msgspec

from convoy.api.keys.repeats import CONTEXT_ERROR
from convoy.api.problem import ErrorBody
from convoy.config.type_resolution import resolved
from convoy.crypto.sealed.answer import MAX_CHUNK_BYTES, AnswerSealer
from convoy.crypto.sealed.request import RequestFacts, RequestKey, request_hash
from convoy.errors import ConvoyError, ProviderError, RequestError
from convoy.fleet.answer import (
    MAX_REFUSAL_BYTES,
    MAX_WHOLE_BYTES,
    AnswerCounts,
    AnswerHead,
    is_of_engine,
    is_too_long,
)
from convoy.fleet.apis.table import APIS
from convoy.fleet.consumer_request import ConsumerRequest, read_consumer_request, refused_prompt_tokens
from convoy.fleet.events import EventReader
from convoy.fleet.provider.allowed import for_engine, wants_usage
from convoy.fleet.provider.stream_rates import StreamRates
from convoy.fleet.provider.upstream import Upstream, UpstreamAnswer
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed, FleetMessage, Kind, Serve

# The time between two signs of life while the engine is silent.
_STILL_HERE_S = 5.0
# Request ids that are remembered until they expire.
_MAX_SEEN = 1 << 17
_LONG_BYTES = 256 * 1024
_BAD_REQUEST = 400, "application/json"
_RATE_LIMITED = 429
# An engine answers so to a path that it does not have. It has the one by which it was measured.
_NO_PATH = frozenset({404, 405, 501})
_MEASURED: Kind = "chat"
# An engine that has the path answers 404 with these codes: a request names something that it does not keep.
_CODES_OF_REQUESTS = frozenset({"item_not_found", "previous_response_not_found", "response_not_found"})
# Characters of an engine's error that a client may read, and of each word beside it.
_MAX_MESSAGE, _MAX_WORD = 1000, 100
# The limit of the bytes before a first token, in events of the longest kind.
_MAX_EARLY_EVENTS = 4

T = TypeVar("T")

Send = Callable[[FleetMessage], Awaitable[None]]


class SeenRequests:
    """Remember request ids, so that no request is answered twice while its seal would still open."""

    def __init__(self) -> None:
        self._expires_s: dict[str, int] = {}

    def add(self, request_id: str, expires_s: int, now_s: float) -> None:
        """Remember a request.

        Raises `ProviderError` for one that was seen, has expired, or is one too many.
        """
        if expires_s <= now_s:
            raise ProviderError("a sealed request has expired")
        if request_id in self._expires_s:
            raise ProviderError("a sealed request came twice")
        if len(self._expires_s) >= _MAX_SEEN:
            self._expires_s = {name: until for name, until in self._expires_s.items() if until > now_s}
            if len(self._expires_s) >= _MAX_SEEN:
                raise ProviderError(f"{_MAX_SEEN} requests are remembered, and none has expired")
        self._expires_s[request_id] = expires_s


class SendWindow:
    """Count the chunks that may be sent before the reader takes some."""

    def __init__(self, size: int) -> None:
        self._left = size
        self._granted = asyncio.Event()

    def grant(self, count: int) -> None:
        """Allow ``count`` more chunks."""
        self._left += count
        self._granted.set()

    @property
    def is_shut(self) -> bool:
        """Return whether `take` waits."""
        return self._left <= 0

    async def take(self) -> None:
        """Wait until one chunk may be sent."""
        while self._left <= 0:
            self._granted.clear()
            await self._granted.wait()
        self._left -= 1


class Provided:
    """Answer one `Serve`.

    ``window`` counts the chunks in flight; ``trace`` is a traceparent for the engine.
    """

    def __init__(
        self,
        serve: Serve,
        send: Send,
        window: int,
        trace: str = "",
        *,
        still_here_s: float = _STILL_HERE_S,
    ) -> None:
        self._still_here_s = still_here_s
        self._serve = serve
        self._api = APIS[serve.kind]
        self._trace = trace
        self._send = send
        self.window = SendWindow(window)
        # A guess, for the provider's own account of its load.
        self.prompt_tokens = 0
        # The provider replaces it by one that all answers of a model share.
        self.rates = StreamRates()
        # Whether accounts share the engine's prefixes.
        self.shares_cache = False
        self._decodes = False
        self._tokens = 0
        self._begun = False

    async def open(
        self, key: RequestKey, name: str, seen: SeenRequests
    ) -> tuple[ConsumerRequest, AnswerSealer]:
        """Open the sealed body, and return the request and the sealer of its answer.

        Raises `SealError` or `ProviderError` for a body that was not sealed for this provider, time and
        request.
        """
        serve = self._serve
        facts = RequestFacts(
            provider=name,
            key_id=serve.key_id,
            model=serve.model,
            request_id=serve.request_id,
            lease=serve.lease,
            expires_s=serve.expires_s,
            max_tokens=serve.max_tokens,
            kind=serve.kind,
        )
        opened = key.open(facts, serve.sealed)
        # Only after it opened: anybody may name an id.
        seen.add(serve.request_id, serve.expires_s, time.time())
        try:
            wanted = await _read(opened.body, serve.kind)
        except RequestError as error:
            raise ProviderError(f"a sealed body is no request: {error.param or 'not JSON'}") from None
        if (wanted.model, wanted.max_tokens) != (serve.model, serve.max_tokens):
            raise ProviderError("the fields beside a sealed body do not match the body")
        self.prompt_tokens = wanted.prompt_tokens
        return wanted, AnswerSealer(opened.answer_secret, request_hash(facts, serve.sealed))

    async def refuse(self, reason: str, *, full: bool = False, refused: bool = False) -> None:
        """Send a `Failed` instead of an answer."""
        await self._send(Failed(self._serve.request_id, reason[:500], full=full, refused=refused))

    async def run(self, wanted: ConsumerRequest, sealer: AnswerSealer, upstream: Upstream) -> None:
        """Ask the engine and send the answer to its end, or a `Failed` with the reason."""
        try:
            body = for_engine(wanted, shares_cache=self.shares_cache)
            async with AsyncExitStack() as stack:
                asked = upstream.ask(wanted.kind, body, self._trace)
                answer = await self._alive(sealer, stack.enter_async_context(asked))
                if answer.status != 200:
                    await self._refused(sealer, answer)
                    return
                reader = EventReader(
                    wanted.kind,
                    stream=wanted.stream,
                    keep_usage=wants_usage(wanted),
                    # Some events repeat the request's own fields, with every character escaped at worst.
                    more_bytes=6 * len(wanted.body),
                )
                if wanted.stream:
                    await self._stream(sealer, answer, reader, wanted.max_tokens)
                else:
                    await self._whole(sealer, answer, reader)
        except RequestError as error:
            await self._not_asked(sealer, error)
        except ConvoyError as error:
            await self.refuse(error.message)

    async def _not_asked(self, sealer: AnswerSealer, error: RequestError, prompt_tokens: int = 0) -> None:
        """Answer a request that is wrong. ``prompt_tokens`` are paid for."""
        await self._head(sealer, AnswerHead(*_BAD_REQUEST))
        await self._chunk(sealer, msgspec.json.encode(self._api.problem_of(error)))
        await self._end(sealer, prompt_tokens, 0)

    async def _refused(self, sealer: AnswerSealer, answer: UpstreamAnswer) -> None:
        """Pass on the engine's refusal, which is either about this request, or about any request.

        The client may read only a refusal of its own request.
        """
        is_rate = answer.status == _RATE_LIMITED
        may_lack = answer.status in _NO_PATH and self._serve.kind != _MEASURED
        is_read = is_rate or may_lack or not is_of_engine(answer.status)
        body = await _start_of(answer.body) if is_read else b""
        if may_lack and not _names_model(body):
            if (error := _error_of_request(body)) is not None:
                raise error
            # Other requests are answered here, so this is no fault of the provider.
            text = f"the engine of this provider does not serve {self._api.path}"
            raise RequestError(text, code="unsupported_endpoint")
        if is_rate and is_too_long(body):
            # A head counts identical requests. It refuses this request, and not its provider.
            raise RequestError("the prompt does not fit the context", code=CONTEXT_ERROR)
        if is_of_engine(answer.status):
            await self.refuse(f"its engine answers {answer.status}", full=answer.status in {429, 503})
            return
        if len(body) > MAX_REFUSAL_BYTES:
            raise ProviderError(f"a refusal of the engine has more than {MAX_REFUSAL_BYTES} bytes")
        await self._head(sealer, answer.head)
        await self._chunk(sealer, body)
        # A prompt that is too long was tokenized before it was refused.
        prompt = refused_prompt_tokens(self.prompt_tokens) if is_too_long(body) else 0
        await self._end(sealer, prompt, 0)

    async def _alive(self, sealer: AnswerSealer, awaited: Awaitable[T]) -> T:
        """Return the engine's result. While the engine is silent, send an empty chunk every 5 s."""
        task = asyncio.ensure_future(awaited)
        try:
            while not (await asyncio.wait({task}, timeout=self._still_here_s))[0]:
                await self._begin(sealer)
                await self._chunk(sealer, b"")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                # The resources that it opened are closed after it, so it must have ended.
                await asyncio.wait({task})

    async def _begin(self, sealer: AnswerSealer) -> None:
        if not self._begun:
            self._begun = True
            await self._send(Began(self._serve.request_id, sealer.nonce))

    async def _head(self, sealer: AnswerSealer, head: AnswerHead) -> None:
        await self._begin(sealer)
        await self._chunk(sealer, msgspec.json.encode(head))

    async def _stream(
        self, sealer: AnswerSealer, answer: UpstreamAnswer, reader: EventReader, max_tokens: int
    ) -> None:
        early = await self._alive(sealer, _to_first_token(answer.body, reader))
        if reader.refusal is not None:
            await self._not_asked(sealer, reader.refusal, refused_prompt_tokens(self.prompt_tokens))
            return
        try:
            self._count(reader.tokens)
            await self._head(sealer, answer.head)
            await self._pieces(sealer, early)
            async for piece in answer.body:
                passed = reader.feed(piece)
                self._count(reader.tokens)
                await self._pieces(sealer, passed)
                if not reader.ended and reader.tokens > most_given(max_tokens):
                    if not self._api.stream_end:
                        raise ProviderError("the engine gives more than was asked")
                    # It is paid for no more than that, whatever it was asked for.
                    await self._chunk(sealer, self._api.stream_end)
                    await self._end(sealer, reader.prompt_tokens or self.prompt_tokens, max_tokens)
                    return
        finally:
            if self._decodes:
                self.rates.end()
                self._decodes = False
        if not reader.ended:
            raise ProviderError("the engine's answer ended before it was complete")
        await self._end(sealer, reader.prompt_tokens, reader.completion_tokens or reader.tokens)

    def _count(self, tokens: int) -> None:
        """Count the tokens given so far. The first one ends the prompt, so the rate counts those after it."""
        given, self._tokens = tokens - self._tokens, tokens
        if given and not self._decodes:
            self.rates.begin()
            self._decodes = True
            given -= 1
        self.rates.given(given)

    async def _whole(self, sealer: AnswerSealer, answer: UpstreamAnswer, reader: EventReader) -> None:
        await self._head(sealer, answer.head)
        data = await self._alive(sealer, _join(answer.body))
        reader.whole(data)
        self._tokens = reader.tokens
        await self._pieces(sealer, data)
        if self._api.generates:
            await self._end(sealer, reader.prompt_tokens, reader.completion_tokens)
        else:
            await self._end(sealer, refused_prompt_tokens(self.prompt_tokens), 0)

    async def _pieces(self, sealer: AnswerSealer, data: bytes) -> None:
        for start in range(0, len(data), MAX_CHUNK_BYTES):
            await self._chunk(sealer, data[start : start + MAX_CHUNK_BYTES])

    async def _chunk(self, sealer: AnswerSealer, data: bytes, *, last: bool = False) -> None:
        if self.window.is_shut and self._decodes:
            with self.rates.held_up():
                await self.window.take()
        else:
            await self.window.take()
        sealed = sealer.seal(data, last=last)
        await self._send(Chunk(self._serve.request_id, sealed, self._tokens, last))

    async def _end(self, sealer: AnswerSealer, prompt_tokens: int, completion_tokens: int) -> None:
        """Send the counts once more under the seal, so that the payer can compare them."""
        counts = AnswerCounts(prompt_tokens, completion_tokens)
        await self._chunk(sealer, msgspec.json.encode(counts), last=True)
        await self._send(Done(self._serve.request_id, prompt_tokens, completion_tokens))


async def _to_first_token(pieces: AsyncIterator[bytes], reader: EventReader) -> bytes:
    """Return the events of a stream up to and with those of its first token, or all of a shorter one."""
    passed = bytearray()
    while not (reader.tokens or reader.ended or reader.refusal):
        piece = await anext(pieces, None)
        if piece is None:
            break
        passed += reader.feed(piece)
        if len(passed) > (most := _MAX_EARLY_EVENTS * reader.max_event_bytes):
            raise ProviderError(f"more than {most} bytes came before a first token")
    return bytes(passed)


def _names_model(refusal: bytes) -> bool:
    """Return whether a refusal is about the model, and so not about the path."""
    return b"model" in refusal.lower()


def _error_of_request(refusal: bytes) -> RequestError | None:
    """Return the error of a refusal that is about this request, and so not about the path."""
    try:
        error = msgspec.json.decode(refusal, type=resolved(ErrorBody)).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if error.param is None and error.code not in _CODES_OF_REQUESTS:
        return None
    param, code = (text and text[:_MAX_WORD] for text in (error.param, error.code))
    return RequestError(error.message[:_MAX_MESSAGE], param=param, code=code)


async def _start_of(pieces: AsyncIterator[bytes]) -> bytes:
    """Return a body, or more than ``MAX_REFUSAL_BYTES`` of one that is longer."""
    start = b""
    async for piece in pieces:
        start += piece
        if len(start) > MAX_REFUSAL_BYTES:
            break
    return start


async def _read(body: bytes, kind: Kind) -> ConsumerRequest:
    """Return the request. A long body is parsed on a thread, so that it holds up no other answer."""
    if len(body) <= _LONG_BYTES:
        return read_consumer_request(body, kind, "", {})
    return await asyncio.to_thread(read_consumer_request, body, kind, "", {})


async def _join(pieces: AsyncIterator[bytes]) -> bytes:
    joined = bytearray()
    async for piece in pieces:
        joined += piece
        if len(joined) > MAX_WHOLE_BYTES:
            raise ProviderError(f"an answer of the engine has more than {MAX_WHOLE_BYTES} bytes")
    return bytes(joined)


def most_given(max_tokens: int) -> int:
    """Return the most events with text for ``max_tokens``: some engines make two events of one token."""
    return max_tokens + max_tokens // 8 + 16
