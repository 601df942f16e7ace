"""Build the answer of /v1/completions: text chunks, or one completion.

The answer echoes and scores the prompt if the request asks for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from msgspec import UNSET

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.usage import UsageCounter
from convoy.api.openai.answers import PromptLogprobs, TextChoice, TextCompletion, TextLogprobs
from convoy.api.openai.token_text import TextLogprobWriter, TokenText
from convoy.api.openai.usage import DONE, chunk_of, closing_of, whole_of
from convoy.api.problem import ErrorBody, body_for
from convoy.engine.outputs import FinishOutput, Output, PromptOutput, TokenLogprob, TokenOutput


class _Text:
    """Hold one choice: its texts and tokens so far, and the offset of its next token."""

    def __init__(self, pieces: TokenText) -> None:
        self.writer = TextLogprobWriter(pieces)
        self.texts: list[str] = []
        self.tokens: list[tuple[int, TokenLogprob | None]] = []
        self.reason: str | None = None
        # True once an end-of-text token was scored. That token has no text.
        self.ended = False


class CompletionAnswer:
    """Implement `ResponseBuilder` for completions."""

    end = DONE

    def __init__(self, asked: ParsedRequest) -> None:
        self.counter = UsageCounter(asked, "cmpl-")
        pieces = self._pieces = TokenText(asked.model.tokenizer)
        # By the index of the request.
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._wants_logprobs = asked.requests[0].params.logprobs is not None
        self._choices = [_Text(pieces) for _ in range(self.counter.num_choices)]
        # For each request with a scored prompt to come: the outputs that came first. They wait, because the
        # echoed prompt must be the first event of its stream.
        self._held: dict[int, list[Output]] = {
            index: [] for index, request in enumerate(asked.requests) if request.prompt_logprobs is not None
        }

    def opening(self) -> list[TextCompletion]:
        """Return the events of echoed prompts that need no score from the engine."""
        events = []
        for index in range(len(self.counter.asked.requests)):
            if self.counter.asked.echo and index not in self._held:
                events += self._prompt_events(index, (None,))
        return events

    def events(self, index: int, output: Output) -> list[TextCompletion]:
        held = self._held.get(index)
        if held is not None and not isinstance(output, PromptOutput):
            held.append(output)
            return []
        self.counter.count(output)
        if isinstance(output, PromptOutput):
            events = self._prompt_events(index, output.logprobs)
            for waiting in self._held.pop(index, []):
                events += self.events(index, waiting)
            return events
        if isinstance(output, TokenOutput | FinishOutput):
            return self._answer_events(self.counter.choice_of(index, output), output)
        return []

    def add(self, index: int, output: Output) -> None:
        self.counter.count(output)
        if isinstance(output, PromptOutput):
            self._held.pop(index, None)
            if self.counter.asked.echo:
                self._put_prompt(index, output.logprobs)
            num_top = self.counter.asked.prompt_logprobs
            if num_top is not None:
                self._prompt_logprobs[index] = self._pieces.prompt_logprobs(output.logprobs, num_top)
        elif isinstance(output, TokenOutput | FinishOutput):
            choice = self._choices[self.counter.choice_of(index, output)]
            choice.texts.append(self._text(choice, output))
            if isinstance(output, FinishOutput):
                choice.reason = "stop" if choice.ended else output.reason
            else:
                choice.tokens.append((output.token_id, output.logprob))

    def whole(self) -> TextCompletion:
        counter = self.counter
        for index in range(len(counter.asked.requests)):
            scored_by_engine = counter.asked.requests[index].prompt_logprobs is not None
            if counter.asked.echo and not scored_by_engine:
                self._put_prompt(index, (None,))
        choices = [
            TextChoice(
                number,
                "".join(choice.texts),
                choice.writer.write(choice.tokens) if self._wants_logprobs else None,
                choice.reason,
                self._prompt_logprobs.get(number // counter.asked.num_choices, UNSET),
            )
            for number, choice in enumerate(self._choices)
        ]
        return whole_of(TextCompletion, counter, choices)

    def keep_alive(self) -> list[TextCompletion]:
        return []

    def closing(self) -> list[TextCompletion]:
        return closing_of(TextCompletion, self.counter)

    def failure(self, error: BaseException) -> list[ErrorBody]:
        return [body_for(error)]

    def _put_prompt(self, index: int, logprobs: Sequence[TokenLogprob | None]) -> None:
        for number in self._choices_of(index):
            choice = self._choices[number]
            choice.texts.insert(0, self.counter.asked.prompt_texts[index])
            if self._wants_logprobs:
                choice.tokens[:0] = self._scored_prompt(index, logprobs)

    def _prompt_events(self, index: int, logprobs: Sequence[TokenLogprob | None]) -> list[TextCompletion]:
        text = self.counter.asked.prompt_texts[index]
        tokens = self._scored_prompt(index, logprobs) if self._wants_logprobs else None
        return [self._chunk(number, text, tokens) for number in self._choices_of(index)]

    def _scored_prompt(
        self, index: int, logprobs: Sequence[TokenLogprob | None]
    ) -> list[tuple[int, TokenLogprob | None]]:
        request = self.counter.asked.requests[index]
        # `prompt_logprobs` may have asked for more alternatives than `logprobs`.
        cut = [one and replace(one, top=one.top[: request.params.logprobs]) for one in logprobs]
        return list(zip(request.prompt_ids, cut, strict=True))

    def _choices_of(self, index: int) -> range:
        num = self.counter.asked.num_choices
        return range(index * num, (index + 1) * num)

    def _answer_events(self, number: int, output: TokenOutput | FinishOutput) -> list[TextCompletion]:
        choice = self._choices[number]
        text = self._text(choice, output)
        if isinstance(output, FinishOutput):
            return [self._chunk(number, text, None, "stop" if choice.ended else output.reason)]
        if not text and not self._wants_logprobs:
            return []
        return [
            self._chunk(number, text, [(output.token_id, output.logprob)] if self._wants_logprobs else None)
        ]

    def _text(self, choice: _Text, output: TokenOutput | FinishOutput) -> str:
        asked = self.counter.asked
        if (
            asked.scoring
            and isinstance(output, TokenOutput)
            and output.token_id in asked.model.tokenizer.eos_ids
        ):
            choice.ended = True
        return "" if choice.ended else output.text

    def _chunk(
        self,
        number: int,
        text: str,
        tokens: list[tuple[int, TokenLogprob | None]] | None,
        reason: str | None = None,
    ) -> TextCompletion:
        logprobs: TextLogprobs | None = None
        if tokens is not None:
            logprobs = self._choices[number].writer.write(tokens)
        return chunk_of(TextCompletion, self.counter, TextChoice(number, text, logprobs, reason))
