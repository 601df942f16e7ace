"""Try a request with one provider: send it, and pass its answer on piece by piece.

The `Seal` is the coordinator's own, or it passes on what a proxy sealed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from convoy.config.type_resolution import resolved
from convoy.crypto.sealed.answer import AnswerOpener
from convoy.crypto.sealed.request import RequestFacts, request_hash, seal_request
from convoy.errors import ProviderError
from convoy.fleet.answer import MAX_REFUSAL_BYTES, MAX_WHOLE_BYTES, AnswerHead
from convoy.fleet.answer_text import AnswerText
from convoy.fleet.consumer_request import ConsumerRequest
from convoy.fleet.coordinator.bounds import BilledOutcome, most_billed
from convoy.fleet.coordinator.options import CoordinatorOptions
from convoy.fleet.coordinator.providers.answering import Answering, ProviderFailed
from convoy.fleet.coordinator.providers.connection import ProviderSocket, Registration
from convoy.fleet.timing import Timing
from convoy.wire.fleet.messages import Began, Chunk, Done, Serve

# A provider may open a sealed request within this time.
LEASE_S = 600
# The most that reading a prompt may take, whatever rate a provider offered.
_MOST_READ_S = 600.0
# The most bytes that are kept before a first token.
_MAX_EARLY_BYTES = 4 * 1024 * 1024
_MAX_WHOLE_BYTES = MAX_WHOLE_BYTES + _MAX_EARLY_BYTES


class Seal(Protocol):
    """Seal a request to a provider and open its answer, for one try."""

    @property
    def wanted(self) -> ConsumerRequest:
        """Return the request."""
        ...

    def serve(self, registration: Registration, request_id: str) -> Serve:
        """Return the message for the provider."""
        ...

    def begun(self, began: Began) -> AnswerHead | None:
        """Take the beginning of an answer, and return its head, or None if the head is in the first chunk."""
        ...

    def chunk(self, chunk: Chunk) -> bytes:
        """Return the bytes of a chunk for the reader. Raises `SealError` for a chunk that does not open."""
        ...

    @property
    def text_bytes(self) -> int:
        """Return the bytes of text that passed. For sealed answers it is the most that there may be."""
        ...

    def read(self, body: bytes) -> None:
        """Take the complete body of an answer that is not streamed."""
        ...


class OwnSeal:
    """Seal with the coordinator's own keys, for consumers that sent it their text."""

    def __init__(self, wanted: ConsumerRequest) -> None:
        self.wanted = wanted
        self._secret = b""
        self._hash = b""
        self._opener: AnswerOpener | None = None
        self._has_head = False
        self._seen = AnswerText(wanted.kind)

    @property
    def text_bytes(self) -> int:
        """Return the bytes of text that passed."""
        return self._seen.bytes

    def read(self, body: bytes) -> None:
        """Count the text in the complete body of an answer that is not streamed."""
        self._seen.whole(body)

    def serve(self, registration: Registration, request_id: str) -> Serve:
        """Return the request, sealed to the provider's key."""
        wanted = self.wanted
        facts = RequestFacts(
            provider=registration.name,
            key_id=registration.key_id,
            model=wanted.model,
            request_id=request_id,
            lease=b"",
            expires_s=int(time.time()) + LEASE_S,
            max_tokens=wanted.max_tokens,
            kind=wanted.kind,
        )
        sealed, self._secret = seal_request(registration.request_key, facts, wanted.body)
        self._hash = request_hash(facts, sealed)
        return serve_of(facts, wanted, sealed)

    def begun(self, began: Began) -> None:
        """Derive the answer's keys."""
        self._opener = AnswerOpener(self._secret, self._hash, began.nonce)

    def chunk(self, chunk: Chunk) -> bytes:
        """Open a chunk. The last one holds the counts, which are no part of the body."""
        assert self._opener is not None, "chunks come after the beginning"
        opened = self._opener.open(chunk.sealed, last=chunk.last)
        if chunk.last:
            return b""
        if self._has_head and self.wanted.stream:
            self._seen.feed(opened)
        self._has_head = self._has_head or bool(opened)
        return opened


def serve_of(facts: RequestFacts, wanted: ConsumerRequest, sealed: bytes) -> Serve:
    """Return a message with a sealed body, and beside it the facts that it is bound to."""
    return Serve(
        request_id=facts.request_id,
        key_id=facts.key_id,
        model=facts.model,
        lease=facts.lease,
        expires_s=facts.expires_s,
        max_tokens=facts.max_tokens,
        kind=wanted.kind,
        sealed=sealed,
    )


class Attempt:
    """Pass one answer to one reader: `head`, then `pieces` to the end, then `outcome`."""

    def __init__(
        self,
        socket: ProviderSocket,
        seal: Seal,
        request_id: str,
        options: CoordinatorOptions,
        *,
        max_early_bytes: int = _MAX_EARLY_BYTES,
        max_whole_bytes: int = _MAX_WHOLE_BYTES,
    ) -> None:
        self._socket = socket
        self._seal = seal
        self._request_id = request_id
        self._options = options
        self._answer: Answering | None = None
        # Pieces that came before the first token.
        self._held: list[bytes] = []
        self._max_early_bytes = max_early_bytes
        self._max_whole_bytes = max_whole_bytes
        # How long the provider may be silent before its first token, and how long that token may take.
        self.max_silence_s, self.max_first_s = options.first_token_s, options.first_token_s
        # Whether the last chunk is here.
        self._said = False
        self._sent_s = 0.0
        # The time from the send to the first token.
        self.first_s = 0.0
        self.outcome: BilledOutcome | None = None
        # A sealed answer's own status stays unknown here.
        self.status = 200
        # The body of an answer with any other status.
        self._refusal = bytearray()

    async def send(self, timing: Timing, trace: str = "") -> None:
        """Seal and send the request. ``trace`` is a traceparent.

        Raises the socket's error if that is gone.
        """
        registration = self._socket.registration
        assert registration is not None, "requests go to providers that registered"
        self._expect(registration)
        with timing.measure("encrypt"):
            serve = self._seal.serve(registration, self._request_id)
        if trace:
            # The trace has random ids only, and no seal covers it.
            serve = msgspec.structs.replace(serve, trace=trace)
        with timing.measure("dispatch"):
            self._answer = await self._socket.ask(serve)
        self._sent_s = time.perf_counter()

    async def head(self, timing: Timing) -> AnswerHead:
        """Wait for the first token, or until it is certain that none comes, and return the answer's head.

        Raises `ProviderError`.
        """
        try:
            return await self._read_head()
        finally:
            self.first_s = time.perf_counter() - self._sent_s
            timing.add("coordinator_to_provider", self.first_s)

    def _expect(self, registration: Registration) -> None:
        """Set how long a provider may be silent before its first token, and how long that token may take."""
        wanted, options = self._seal.wanted, self._options
        offer = registration.offers.get(wanted.model)
        # Counts every byte as a token. That is about four times what a text has, so it leaves as much again
        # for the prompts before this one.
        read_s = 0.0 if offer is None else wanted.most_prompt_tokens / offer.prefill_rate
        self.max_silence_s = options.first_token_s + min(_MOST_READ_S, read_s)
        self.max_first_s = self.max_silence_s if wanted.stream else self.max_silence_s + options.whole_s

    async def _read_head(self) -> AnswerHead:
        try:
            async with asyncio.timeout(self.max_first_s):
                return await self._to_first_token()
        except TimeoutError:
            # The provider kept saying that it is alive, and said nothing else.
            raise ProviderFailed(f"a provider gave no token for {self.max_first_s:g} s") from None

    async def _to_first_token(self) -> AnswerHead:
        assert self._answer is not None, "nothing was sent yet"
        message = await self._answer.get(self.max_silence_s)
        if not isinstance(message, Began):
            raise ProviderError(f"an answer began with {type(message).__name__}")
        head, num_bytes = self._seal.begun(message) or await self._first_said(), 0
        self.status = head.status
        while head.status == 200 and not self._answer.tokens:
            piece = await self._next(self.max_silence_s)
            if piece is None:
                break
            num_bytes += len(piece[0])
            if num_bytes > self._max_early_bytes:
                raise ProviderFailed(f"more than {self._max_early_bytes} bytes came before a first token")
            self._held.append(piece[0])
        return head

    async def _first_said(self) -> AnswerHead:
        """Return the head in the first chunk with bytes.

        A provider sends empty chunks while its engine is silent.
        """
        while (piece := await self._next(self.max_silence_s)) == (b"",):
            pass
        return _head_in(piece)

    async def whole(self) -> bytes:
        """Return the rest of an answer that is not streamed.

        Raises as `pieces`, and for one that is too long.
        """
        joined = bytearray()
        async for piece in self.pieces():
            joined += piece
            if len(joined) > self._max_whole_bytes:
                raise ProviderFailed(f"an answer has more than {self._max_whole_bytes} bytes")
        body = bytes(joined)
        self._seal.read(body)
        return body

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the rest of the body. Raises `ProviderError`; then the answer so far is incomplete."""
        for piece in self._held:
            yield piece
        self._held.clear()
        while self.outcome is None:
            found = await self._next(self._options.chunk_s)
            if found is not None:
                if self.status != 200:
                    self._refusal += found[0][: MAX_REFUSAL_BYTES - len(self._refusal)]
                yield found[0]

    async def _next(self, wait_s: float) -> tuple[bytes] | None:
        """Return the next piece, or None at the end."""
        assert self._answer is not None, "nothing was sent yet"
        if self.outcome is not None:
            return None
        message = await self._answer.get(wait_s)
        if isinstance(message, Chunk):
            piece = self._seal.chunk(message)
            self._said = message.last
            return (piece,)
        if not isinstance(message, Done) or not self._said:
            raise ProviderFailed("an answer ended before its last chunk")
        self.outcome = BilledOutcome(message.prompt_tokens, message.completion_tokens)
        return None

    def most_billed(self) -> BilledOutcome:
        """Return the most that may be billed for the answer so far."""
        registration, wanted = self._socket.registration, self._seal.wanted
        offer = None if registration is None else registration.offers.get(wanted.model)
        return most_billed(
            wanted,
            template_tokens=0 if offer is None else offer.template_tokens,
            text_bytes=self._seal.text_bytes,
            refusal=None if self.status == 200 else bytes(self._refusal),
        )

    @property
    def tokens(self) -> int:
        """Return the tokens given so far, as the provider reports them."""
        return 0 if self._answer is None else self._answer.tokens

    def close(self) -> None:
        """Give the answer up, and tell the provider unless the answer is over."""
        self._socket.give_up(self._request_id)


def _head_in(first: tuple[bytes] | None) -> AnswerHead:
    if first is None:
        raise ProviderError("an answer has no head")
    try:
        head = msgspec.json.decode(first[0], type=resolved(AnswerHead))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ProviderError("an answer's head cannot be read") from None
    if not 200 <= head.status <= 599:
        raise ProviderError(f"an answer has status {head.status}")
    kind = head.content_type
    if not (kind.isascii() and kind.isprintable() and len(kind) <= 200):
        raise ProviderError("an answer has an invalid content type")
    return head
