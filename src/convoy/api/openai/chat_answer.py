"""Build the answer of /v1/chat/completions: chat chunks, or one chat completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.reply import Ended, ReplyReader
from convoy.api.chat.usage import UsageCounter
from convoy.api.openai.answers import (
    AnswerCall,
    AnswerFunction,
    AssistantMessage,
    CallDelta,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    FunctionDelta,
    PromptLogprobs,
    PromptProgress,
)
from convoy.api.openai.token_text import TokenText
from convoy.api.openai.usage import DONE, chunk_of, closing_of, progress_of, whole_of
from convoy.api.problem import ErrorBody, body_for
from convoy.engine.outputs import Output, PrefillOutput, PromptOutput, TokenLogprob, TokenOutput
from convoy.model.text.pieces import CallPiece, Piece, ReasoningPiece, TextPiece


@dataclass(slots=True)
class _Message:
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    # The id, the name and the pieces of the arguments of each call.
    calls: list[tuple[str, str, list[str]]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None

    def add(self, piece: Piece | Ended) -> None:
        match piece:
            case TextPiece(text):
                self.texts.append(text)
            case ReasoningPiece(text):
                self.reasoning.append(text)
            case CallPiece(id=number, name=name, arguments=arguments):
                if number:
                    self.calls.append((number, name, []))
                self.calls[-1][2].append(arguments)
            case Ended(reason=reason):
                self.reason = reason

    def whole(self) -> AssistantMessage:
        text = "".join(self.texts)
        calls = [
            AnswerCall(number, AnswerFunction(name, "".join(parts))) for number, name, parts in self.calls
        ]
        return AssistantMessage(
            content=None if calls and not text else text,
            reasoning_content="".join(self.reasoning) if self.reasoning else UNSET,
            tool_calls=calls or UNSET,
        )


class ChatAnswer:
    """Implement `ResponseBuilder` for chat."""

    end = DONE

    def __init__(self, asked: ParsedRequest) -> None:
        self.counter = UsageCounter(asked, "chatcmpl-")
        self._reader = ReplyReader(asked)
        self._pieces = TokenText(asked.model.tokenizer)
        self._wants_logprobs = asked.requests[0].params.logprobs is not None
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._messages = [_Message() for _ in range(self.counter.num_choices)]

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(i, Delta(role="assistant", content="")) for i in range(self.counter.num_choices)]

    def events(self, index: int, output: Output) -> list[ChatChunk]:  # noqa: ARG002 - a chat has one request
        self.counter.count(output)
        if isinstance(output, PrefillOutput):
            progress = PromptProgress(output.num_prompt, output.num_cached, output.num_done)
            return [progress_of(ChatChunk, self.counter, progress)]
        logprobs = None
        pieces = self._reader.read(output)
        if isinstance(output, TokenOutput) and output.logprob is not None:
            logprobs = self._logprobs([output.logprob])
            # A token without text has a chunk too, for its log-probability.
            pieces = pieces or [(output.choice, TextPiece(""))]
        chunks = []
        for choice, piece in pieces:
            if isinstance(piece, Ended):
                chunks.append(self._chunk(choice, Delta(), reason=piece.reason))
            else:
                chunks.append(self._chunk(choice, _delta(piece), logprobs))
            # The first chunk of a token has its log-probability.
            logprobs = None
        return chunks

    def add(self, index: int, output: Output) -> None:  # noqa: ARG002 - a chat has one request
        self.counter.count(output)
        num_top = self.counter.asked.prompt_logprobs
        if isinstance(output, PromptOutput) and num_top is not None:
            self._prompt_logprobs = self._pieces.prompt_logprobs(output.logprobs, num_top)
        if isinstance(output, TokenOutput) and output.logprob is not None:
            self._messages[output.choice].logprobs.append(output.logprob)
        for choice, piece in self._reader.read(output):
            self._messages[choice].add(piece)

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                number,
                message.whole(),
                self._logprobs(message.logprobs) if self._wants_logprobs else None,
                message.reason,
            )
            for number, message in enumerate(self._messages)
        ]
        return whole_of(ChatCompletion, self.counter, choices, prompt_logprobs=self._prompt_logprobs)

    def keep_alive(self) -> list[ChatChunk]:
        """Return a chunk without text: some clients end a stream in which only comments come."""
        return [self._chunk(0, Delta())]

    def closing(self) -> list[ChatChunk]:
        return closing_of(ChatChunk, self.counter)

    def failure(self, error: BaseException) -> list[ErrorBody]:
        return [body_for(error)]

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs([self._pieces.chat_logprob(logprob) for logprob in logprobs])

    def _chunk(
        self, choice: int, delta: Delta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> ChatChunk:
        return chunk_of(ChatChunk, self.counter, ChunkChoice(choice, delta, logprobs, reason))


def _delta(piece: Piece) -> Delta:
    match piece:
        case TextPiece(text):
            return Delta(content=text)
        case ReasoningPiece(text):
            return Delta(reasoning_content=text)
        case CallPiece(index=index, id=number, name=name, arguments=arguments):
            if not number:
                return Delta(tool_calls=[CallDelta(index, function=FunctionDelta(arguments=arguments))])
            function = FunctionDelta(name, arguments)
            return Delta(tool_calls=[CallDelta(index, number, "function", function)])
