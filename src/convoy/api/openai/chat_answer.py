"""Build the answer of /v1/chat/completions: chat chunks, or one chat completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from convoy.api.openai.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChunkChoice,
    Delta,
    PromptLogprobs,
)
from convoy.api.openai.parsed_request import ParsedRequest
from convoy.api.openai.token_text import TokenText
from convoy.api.openai.usage import UsageCounter
from convoy.engine.outputs import FinishOutput, Output, PromptOutput, TokenLogprob, TokenOutput


@dataclass(slots=True)
class _Message:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


class ChatAnswer:
    """Implement `ResponseBuilder` for chat."""

    def __init__(self, asked: ParsedRequest) -> None:
        self.counter = UsageCounter(asked, "chatcmpl-")
        self._pieces = TokenText(asked.model.tokenizer)
        self._wants_logprobs = asked.requests[0].params.logprobs is not None
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._messages = [_Message() for _ in range(self.counter.num_choices)]

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(i, Delta(role="assistant", content="")) for i in range(self.counter.num_choices)]

    def events(self, index: int, output: Output) -> list[ChatChunk]:
        self.counter.count(output)
        match output:
            case TokenOutput(text=text, logprob=logprob) if text or logprob is not None:
                logprobs = None if logprob is None else self._logprobs([logprob])
                return [self._chunk(self.counter.choice_of(index, output), Delta(content=text), logprobs)]
            case FinishOutput(reason=reason, text=text):
                choice = self.counter.choice_of(index, output)
                held = [self._chunk(choice, Delta(content=text))] if text else []
                return [*held, self._chunk(choice, Delta(), reason=reason)]
        return []

    def add(self, index: int, output: Output) -> None:
        self.counter.count(output)
        num_top = self.counter.asked.prompt_logprobs
        if isinstance(output, PromptOutput) and num_top is not None:
            self._prompt_logprobs = self._pieces.prompt_logprobs(output.logprobs, num_top)
        if isinstance(output, TokenOutput | FinishOutput):
            message = self._messages[self.counter.choice_of(index, output)]
            message.texts.append(output.text)
            if isinstance(output, FinishOutput):
                message.reason = output.reason
            elif output.logprob is not None:
                message.logprobs.append(output.logprob)

    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                number,
                AssistantMessage("".join(message.texts)),
                self._logprobs(message.logprobs) if self._wants_logprobs else None,
                message.reason,
            )
            for number, message in enumerate(self._messages)
        ]
        counter = self.counter
        return ChatCompletion(
            id=counter.id,
            created=counter.created,
            model=counter.asked.model.name,
            choices=choices,
            usage=counter.usage,
            prompt_logprobs=self._prompt_logprobs,
        )

    def usage_event(self) -> ChatChunk:
        counter = self.counter
        return ChatChunk(
            id=counter.id,
            created=counter.created,
            model=counter.asked.model.name,
            choices=[],
            usage=counter.usage,
        )

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs([self._pieces.chat_logprob(logprob) for logprob in logprobs])

    def _chunk(
        self, choice: int, delta: Delta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> ChatChunk:
        counter = self.counter
        return ChatChunk(
            id=counter.id,
            created=counter.created,
            model=counter.asked.model.name,
            choices=[ChunkChoice(choice, delta, logprobs, reason)],
            usage=counter.event_usage,
        )
