"""What both kinds of answer count and share: tokens, finish reasons, the identity of the answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from convoy.api.openai.answers import PromptTokensDetails, TokenUsage
from convoy.api.openai.parsed_request import ParsedRequest
from convoy.engine.outputs import FinishOutput, Output, TokenOutput


class ResponseBuilder(Protocol):
    """An answer in the making: fed with every output in order, read as stream events or as one body."""

    @property
    def tally(self) -> UsageCounter: ...

    def opening(self) -> Sequence[msgspec.Struct]:
        """Events before the first token."""
        ...

    def events(self, index: int, output: Output) -> Sequence[msgspec.Struct]:
        """What an output of request ``index`` adds to the stream."""
        ...

    def add(self, index: int, output: Output) -> None:
        """Keep an output for `whole`."""
        ...

    def whole(self) -> msgspec.Struct:
        """The complete body, once every choice is finished."""
        ...

    def usage_event(self) -> msgspec.Struct:
        """The event after the last choice, with the usage alone."""
        ...


@dataclass(slots=True)
class UsageCounter:
    """Counts of one answer."""

    asked: ParsedRequest
    prefix: str
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: int = 0
    cached_tokens: int = 0  # as far as choices have finished
    first_token_s: float | None = None  # monotonic
    queued_s: float = 0.0  # of the prompt that waited longest, once it has ended

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    def count(self, output: Output) -> None:
        """Call once per output."""
        if isinstance(output, TokenOutput):
            self.completion_tokens += 1
            if self.first_token_s is None:
                self.first_token_s = time.monotonic()
        elif isinstance(output, FinishOutput) and output.choice == 0:
            # a prompt is counted once, however many choices it has
            self.cached_tokens += output.cached_tokens
            self.queued_s = max(self.queued_s, output.queued_s)

    def choice_of(self, index: int, output: TokenOutput | FinishOutput) -> int:
        """The number of a choice among all prompts' choices."""
        return index * self.asked.num_choices + output.choice

    @property
    def num_choices(self) -> int:
        return len(self.asked.requests) * self.asked.num_choices

    @property
    def usage(self) -> TokenUsage:
        prompt = self.asked.num_prompt_tokens
        details = PromptTokensDetails(self.cached_tokens)
        return TokenUsage(prompt, self.completion_tokens, prompt + self.completion_tokens, details)

    @property
    def event_usage(self) -> TokenUsage | msgspec.UnsetType | None:
        """What a chunk's ``usage`` is: the count so far, null where a usage event will come, or absent."""
        if self.asked.continuous_usage:
            return self.usage
        return None if self.asked.include_usage else msgspec.UNSET
