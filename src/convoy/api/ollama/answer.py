"""Build the answers of /api/chat and /api/generate: lines of JSON, or one body."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.reply import Ended, ReplyReader, raw_object
from convoy.api.chat.usage import UsageCounter
from convoy.api.ollama.problem import OllamaError, problem_of
from convoy.engine.outputs import Output
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece

_NS = 1_000_000_000


class OllamaFunction(msgspec.Struct, frozen=True):
    """Hold the function of a call, with its arguments as the JSON text of an object."""

    name: str
    arguments: msgspec.Raw


class OllamaCalled(msgspec.Struct, frozen=True):
    """Hold a complete call."""

    function: OllamaFunction


class OllamaReply(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Hold a message of the assistant, or what a line adds to it."""

    role: str = msgspec.field(default_factory=lambda: "assistant")
    content: str
    thinking: str = ""
    tool_calls: Sequence[OllamaCalled] = ()


class OllamaLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Hold a line of an answer, or the whole. A chat has ``message``, a plain prompt ``response``.

    The last line has ``done_reason``, counts of tokens and times in nanoseconds.
    """

    model: str
    created_at: str
    message: OllamaReply | None = None
    response: str | None = None
    thinking: str = ""
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaAnswer:
    """Implement `ResponseBuilder` for this API. A call is sent whole, because its arguments are an object."""

    end = b""

    def __init__(self, asked: ParsedRequest, *, is_chat: bool) -> None:
        """Begin the answer to ``asked``, in the form of a chat or of a plain prompt."""
        self.counter = UsageCounter(asked, "ollama-")
        self._is_chat = is_chat
        self._reader = ReplyReader(asked)
        self._began_s = time.monotonic()
        self._ended: Ended | None = None
        # The name and the arguments of the call that is being read.
        self._call: tuple[str, list[str]] | None = None
        self._parts: list[OllamaReply] = []

    def opening(self) -> Sequence[OllamaLine]:
        return ()

    def keep_alive(self) -> Sequence[OllamaLine]:
        return [self._line(OllamaReply(content=""))]

    def events(self, index: int, output: Output) -> Sequence[OllamaLine]:  # noqa: ARG002 - there is one request
        return [self._line(part) for part in self._read(output)]

    def closing(self) -> Sequence[OllamaLine]:
        return [self._last(OllamaReply(content=""))]

    def failure(self, error: BaseException) -> Sequence[OllamaError]:
        return [problem_of(error)]

    def add(self, index: int, output: Output) -> None:  # noqa: ARG002 - there is one request
        self._parts += self._read(output)

    def whole(self) -> OllamaLine:
        return self._last(
            OllamaReply(
                content="".join(part.content for part in self._parts),
                thinking="".join(part.thinking for part in self._parts),
                tool_calls=tuple(call for part in self._parts for call in part.tool_calls),
            )
        )

    def _read(self, output: Output) -> list[OllamaReply]:
        self.counter.count(output)
        return [part for _, piece in self._reader.read(output) for part in self._take(piece)]

    def _take(self, piece: Piece | Ended) -> list[OllamaReply]:
        if isinstance(piece, CallPiece) and not piece.id and self._call is not None:
            self._call[1].append(piece.arguments)
            return []
        before = self._end_call()
        match piece:
            case TextPiece(text):
                return [*before, OllamaReply(content=text)] if text else before
            case ReasoningPiece(text):
                return [*before, OllamaReply(content="", thinking=text)] if text else before
            case CallPiece(name=name, arguments=arguments):
                self._call = name, [arguments]
            case Ended():
                self._ended = piece
        return before

    def _end_call(self) -> list[OllamaReply]:
        """Return the call that has been read. A call with cut-off or malformed arguments becomes text."""
        if self._call is None:
            return []
        (name, pieces), self._call = self._call, None
        text = "".join(pieces)
        arguments = raw_object(text)
        if arguments is None:
            return [OllamaReply(content=text)] if text else []
        return [OllamaReply(content="", tool_calls=(OllamaCalled(OllamaFunction(name, arguments)),))]

    def _line(self, part: OllamaReply, **more: Any) -> OllamaLine:
        shown: dict[str, Any] = {"response": part.content, "thinking": part.thinking}
        if self._is_chat:
            shown = {"message": part}
        created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        fields = {"done": False, **shown, **more}
        return OllamaLine(model=self.counter.asked.model.name, created_at=created, **fields)

    def _last(self, part: OllamaReply) -> OllamaLine:
        counter, end_s = self.counter, time.monotonic()
        if not counter.asked.requests:
            why = "unload" if counter.asked.keep_alive_s == 0 else "load"
            return self._line(part, done=True, done_reason=why)
        assert self._ended is not None, "the answer is complete"
        first_s = end_s if counter.first_token_s is None else counter.first_token_s
        return self._line(
            part,
            done=True,
            done_reason="length" if self._ended.reason == "length" else "stop",
            total_duration=int((end_s - self._began_s) * _NS),
            load_duration=int(counter.load_s * _NS),
            prompt_eval_count=counter.asked.num_prompt_tokens,
            prompt_eval_duration=int((first_s - self._began_s - counter.load_s) * _NS),
            eval_count=counter.completion_tokens,
            eval_duration=int((end_s - first_s) * _NS),
        )
