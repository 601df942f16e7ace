"""Build the answer of POST /v1/messages: events, or one message."""

from __future__ import annotations

import base64
import hmac
from collections.abc import Callable, Sequence

import msgspec

from convoy.api.anthropic import shapes
from convoy.api.anthropic.problem import problem_of
from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.reply import Ended, ReplyReader, raw_object
from convoy.api.chat.usage import UsageCounter
from convoy.engine.outputs import Output
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece


class MessageAnswer:
    """Implement `ResponseBuilder` for this API."""

    end = b""

    def __init__(
        self,
        asked: ParsedRequest,
        *,
        secret: bytes,
        reader: Callable[[ParsedRequest], ReplyReader] = ReplyReader,
    ) -> None:
        """Begin the answer to ``asked``. ``secret`` signs its reasoning; ``reader`` makes its pieces."""
        self.counter = UsageCounter(asked, "msg_")
        self._reader = reader(asked)
        self._blocks = BlockWriter(secret)
        self._ended: Ended | None = None

    def opening(self) -> Sequence[msgspec.Struct]:
        return [shapes.MessageStart(self._message((), None)), shapes.PingEvent()]

    def keep_alive(self) -> Sequence[msgspec.Struct]:
        return [shapes.PingEvent()]

    def events(self, index: int, output: Output) -> Sequence[msgspec.Struct]:  # noqa: ARG002 - there is one request
        self.counter.count(output)
        events: list[msgspec.Struct] = []
        for _, piece in self._reader.read(output):
            if isinstance(piece, Ended):
                self._ended = piece
                events += self._blocks.close(cut=piece.reason == "length")
            else:
                events += self._blocks.write(piece)
        return events

    def closing(self) -> Sequence[msgspec.Struct]:
        return [shapes.MessageDelta(self._stopped(), self._usage()), shapes.MessageStop()]

    def failure(self, error: BaseException) -> Sequence[msgspec.Struct]:
        return [problem_of(error)]

    def add(self, index: int, output: Output) -> None:
        self.events(index, output)

    def whole(self) -> shapes.MessageBody:
        blocks, stopped = self._blocks.blocks, self._stopped()
        called = any(isinstance(block, shapes.ToolUseBlock) for block in blocks)
        if self._blocks.has_malformed and not called and stopped.stop_reason == "tool_use":
            stopped = shapes.Stopped("end_turn", None)
        return self._message(blocks, stopped)

    def _message(self, blocks: Sequence[shapes.Block], stopped: shapes.Stopped | None) -> shapes.MessageBody:
        return shapes.MessageBody(
            id=self.counter.id,
            model=self.counter.asked.model.name,
            content=blocks,
            stop_reason=stopped.stop_reason if stopped else None,
            stop_sequence=stopped.stop_sequence if stopped else None,
            usage=self._usage(),
        )

    def _stopped(self) -> shapes.Stopped:
        assert self._ended is not None, "the answer is complete"
        match self._ended:
            case Ended("tool_calls"):
                return shapes.Stopped("tool_use", None)
            case Ended("length") if self.counter.asked.requests[0].open_ended:
                return shapes.Stopped("model_context_window_exceeded", None)
            case Ended("length"):
                return shapes.Stopped("max_tokens", None)
            case Ended(_, str(stop)):
                return shapes.Stopped("stop_sequence", stop)
        return shapes.Stopped("end_turn", None)

    def _usage(self) -> shapes.MessageUsage:
        counter = self.counter
        run = counter.asked.num_prompt_tokens - counter.cached_tokens
        return shapes.MessageUsage(run, counter.cached_tokens, counter.completion_tokens)


class BlockWriter:
    """Write pieces as content blocks. A block is complete before the next one begins."""

    def __init__(self, secret: bytes) -> None:
        self.blocks: list[shapes.Block] = []
        # Whether a block is the text of a malformed call.
        self.has_malformed = False
        self._secret = secret
        # The first piece of the open block, and the texts of all its pieces.
        self._first: Piece | None = None
        self._texts: list[str] = []

    def write(self, piece: Piece) -> list[msgspec.Struct]:
        """Return the events of a piece: its delta, after the end and the start of blocks if it needs them."""
        text = piece.arguments if isinstance(piece, CallPiece) else piece.text
        if not text and not isinstance(piece, CallPiece):
            return []
        events: list[msgspec.Struct] = []
        if not self._continues(piece):
            events += self.close()
            self._first = piece
            events.append(shapes.BlockStart(len(self.blocks), _opened(piece)))
        if text:
            self._texts.append(text)
            events.append(shapes.BlockDelta(len(self.blocks), _delta(piece)))
        return events

    def close(self, *, cut: bool = False) -> list[msgspec.Struct]:
        """Return the events that end the open block, if there is one.

        ``cut``: the answer reached its length. A call whose arguments are then no object has no input.
        Another such call was written wrongly, so it becomes text: a client must not run it without its input.
        """
        if self._first is None:
            return []
        index, text, events = len(self.blocks), "".join(self._texts), list[msgspec.Struct]()
        match self._first:
            case TextPiece():
                self.blocks.append(shapes.TextBlock(text))
            case ReasoningPiece():
                signature = self._sign(text)
                self.blocks.append(shapes.ThinkingBlock(text, signature))
                events.append(shapes.BlockDelta(index, shapes.SignatureDelta(signature)))
            case CallPiece(id=call_id, name=name):
                given = raw_object(text)
                if given is None and not cut:
                    self.has_malformed = True
                    self.blocks.append(shapes.TextBlock(text))
                else:
                    self.blocks.append(shapes.ToolUseBlock(call_id, name, given or {}))
        self._first = None
        self._texts.clear()
        return [*events, shapes.BlockStop(index)]

    def _continues(self, piece: Piece) -> bool:
        first = self._first
        if isinstance(piece, CallPiece) and isinstance(first, CallPiece):
            return piece.index == first.index
        return type(piece) is type(first)

    def _sign(self, text: str) -> str:
        """Return a mark of this process. Clients demand one; a replayed reasoning needs none."""
        digest = hmac.digest(self._secret, text.encode(errors="surrogatepass"), "sha256")
        return base64.b64encode(digest).decode()


def _opened(piece: Piece) -> shapes.Block:
    match piece:
        case TextPiece():
            return shapes.TextBlock("")
        case ReasoningPiece():
            return shapes.ThinkingBlock("", "")
        case CallPiece(id=call_id, name=name):
            return shapes.ToolUseBlock(call_id, name, {})


def _delta(piece: Piece) -> shapes.TextDelta | shapes.ThinkingDelta | shapes.InputJsonDelta:
    match piece:
        case TextPiece(text):
            return shapes.TextDelta(text)
        case ReasoningPiece(text):
            return shapes.ThinkingDelta(text)
        case CallPiece(arguments=arguments):
            return shapes.InputJsonDelta(arguments)
