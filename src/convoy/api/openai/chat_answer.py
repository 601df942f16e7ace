"""Build the answer of /v1/chat/completions: chat chunks, or one chat completion."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import UNSET, UnsetType

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.usage import UsageCounter
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
from convoy.api.openai.token_text import TokenText
from convoy.api.openai.usage import DONE, event_usage_of, usage_of
from convoy.api.problem import ErrorBody, body_for
from convoy.engine.outputs import FinishOutput, Output, PromptOutput, TokenLogprob, TokenOutput


@dataclass(slots=True)
class _Message:
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: str | None = None


class ChatAnswer:
    """Implement `ResponseBuilder` for chat."""

    end = DONE

    def __init__(self, asked: ParsedRequest) -> None:
        self.tally = UsageCounter(asked, "chatcmpl-")
        self._pieces = TokenText(asked.model.tokenizer)
        self._wants_logprobs = asked.requests[0].params.logprobs is not None
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._messages = [_Message() for _ in range(self.tally.num_choices)]

    def opening(self) -> list[ChatChunk]:
        return [self._chunk(i, Delta(role="assistant", content="")) for i in range(self.tally.num_choices)]

    def events(self, index: int, output: Output) -> list[ChatChunk]:
        self.tally.count(output)
        match output:
            case TokenOutput(text=text, logprob=logprob) if text or logprob is not None:
                logprobs = None if logprob is None else self._logprobs([logprob])
                return [self._chunk(self.tally.choice_of(index, output), Delta(content=text), logprobs)]
            case FinishOutput(reason=reason, text=text):
                choice = self.tally.choice_of(index, output)
                held = [self._chunk(choice, Delta(content=text))] if text else []
                return [*held, self._chunk(choice, Delta(), reason=reason)]
        return []

    def add(self, index: int, output: Output) -> None:
        self.tally.count(output)
        num_top = self.tally.asked.prompt_logprobs
        if isinstance(output, PromptOutput) and num_top is not None:
            self._prompt_logprobs = self._pieces.prompt_logprobs(output.logprobs, num_top)
        if isinstance(output, TokenOutput | FinishOutput):
            message = self._messages[self.tally.choice_of(index, output)]
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
        tally = self.tally
        return ChatCompletion(
            id=tally.id,
            created=tally.created,
            model=tally.asked.model.name,
            choices=choices,
            usage=usage_of(tally),
            prompt_logprobs=self._prompt_logprobs,
        )

    def keep_alive(self) -> list[ChatChunk]:
        return []

    def closing(self) -> list[ChatChunk]:
        """Return the event with the usage alone, if it was asked for."""
        tally = self.tally
        if not tally.asked.include_usage:
            return []
        usage = ChatChunk(
            id=tally.id,
            created=tally.created,
            model=tally.asked.model.name,
            choices=[],
            usage=usage_of(tally),
        )
        return [usage]

    def failure(self, error: BaseException) -> list[ErrorBody]:
        return [body_for(error)]

    def _logprobs(self, logprobs: list[TokenLogprob]) -> ChatLogprobs:
        return ChatLogprobs([self._pieces.chat_logprob(logprob) for logprob in logprobs])

    def _chunk(
        self, choice: int, delta: Delta, logprobs: ChatLogprobs | None = None, reason: str | None = None
    ) -> ChatChunk:
        tally = self.tally
        return ChatChunk(
            id=tally.id,
            created=tally.created,
            model=tally.asked.model.name,
            choices=[ChunkChoice(choice, delta, logprobs, reason)],
            usage=event_usage_of(tally),
        )
