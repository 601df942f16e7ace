"""Open a sealed answer at the proxy, chunk by chunk. It is complete only if its seal says so."""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec

from convoy.config.type_resolution import resolved
from convoy.crypto.sealed.answer import AnswerOpener
from convoy.errors import FrameError, ProviderError, SealError
from convoy.fleet.answer import MAX_WHOLE_BYTES, AnswerCounts, AnswerHead
from convoy.fleet.proxy.client import suspect
from convoy.wire.fleet.messages import Began, Chunk, Done, Failed
from convoy.wire.fleet.records import Record, RecordReader, Timed


class AnswerReader:
    """Read an answer for one reader: `head`, then `pieces` to the end. Both raise `ProviderError`."""

    def __init__(
        self,
        body: AsyncIterator[bytes],
        secret: bytes,
        request_hash: bytes,
        *,
        max_whole_bytes: int = MAX_WHOLE_BYTES,
    ) -> None:
        self._records = _records(body)
        self._max_whole_bytes = max_whole_bytes
        self._secret = secret
        self._hash = request_hash
        self._opener: AnswerOpener | None = None
        # The provider's counts, under its seal.
        self.counts: AnswerCounts | None = None
        # The coordinator's counts.
        self.billed: AnswerCounts | None = None
        self.us: dict[str, int] = {}

    async def head(self) -> AnswerHead:
        """Return the head, which is the first chunk with bytes."""
        record = await anext(self._records, None)
        if isinstance(record, Failed):
            raise suspect("the provider failed before it began")
        if not isinstance(record, Began):
            raise suspect("the coordinator relays an answer that does not begin")
        self._opener = AnswerOpener(self._secret, self._hash, record.nonce)
        while not (first := await self._next_chunk()) and not self._opener.ended:
            # The provider's engine is silent so far.
            pass
        try:
            head = msgspec.json.decode(first, type=resolved(AnswerHead))
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise suspect("the provider's answer has no head") from None
        kind = head.content_type
        if not (200 <= head.status <= 599 and kind.isascii() and kind.isprintable() and len(kind) <= 200):
            raise suspect("the provider's answer has an invalid head")
        return head

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the body; then read `counts`, and the coordinator's records."""
        assert self._opener is not None, "the head comes first"
        while self.counts is None:
            piece = await self._next_chunk()
            if self._opener.ended:
                self.counts = _counts(piece)
            elif piece:
                yield piece
        async for record in self._records:
            if isinstance(record, Done) and self.billed is None:
                self.billed = AnswerCounts(record.prompt_tokens, record.completion_tokens)
            elif isinstance(record, Timed):
                self.us = record.us
            else:
                raise suspect("the coordinator relays more than the answer")

    async def whole(self) -> bytes:
        """Return the rest of an answer that is not streamed.

        Raises as `pieces`, and for one that is too long.
        """
        joined = bytearray()
        async for piece in self.pieces():
            joined += piece
            if len(joined) > self._max_whole_bytes:
                raise suspect(f"the provider's answer has more than {self._max_whole_bytes} bytes")
        return bytes(joined)

    @property
    def difference(self) -> str:
        """Return the difference between the bill and the provider's counts; empty if there is none."""
        assert self.counts is not None, "after the last piece"
        sealed = f"{self.counts.prompt_tokens}+{self.counts.completion_tokens}"
        if self.billed is None:
            return f"no bill was shown, sealed {sealed}"
        if self.billed == self.counts:
            return ""
        return f"billed {self.billed.prompt_tokens}+{self.billed.completion_tokens}, sealed {sealed}"

    async def _next_chunk(self) -> bytes:
        assert self._opener is not None, "chunks come after the beginning"
        record = await anext(self._records, None)
        if isinstance(record, Failed):
            raise suspect("the provider failed before the answer was complete")
        if not isinstance(record, Chunk):
            raise suspect("the answer ended before its last chunk")
        try:
            return self._opener.open(record.sealed, last=record.last)
        except SealError:
            raise suspect("the answer was changed on its way, or parts of it moved or left out") from None


async def _records(body: AsyncIterator[bytes]) -> AsyncIterator[Record]:
    reader = RecordReader()
    async for data in body:
        try:
            found = reader.feed(data)
        except FrameError:
            raise suspect("the coordinator relays something that is no sealed answer") from None
        for record in found:
            yield record


def _counts(data: bytes) -> AnswerCounts:
    try:
        return msgspec.json.decode(data, type=resolved(AnswerCounts))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ProviderError(
            "the provider's answer has no counts", public="the provider's answer has no counts"
        ) from None
