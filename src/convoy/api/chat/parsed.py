"""Hold one HTTP request in the engine's terms, whichever endpoint read it."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.api.service import ServedModel
from convoy.engine.requests.request import GenerationRequest
from convoy.model.text.formats.parser import ParserOptions


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Hold one HTTP request in the engine's terms: one `GenerationRequest` per prompt.

    Choices are numbered prompt-major. ``prompt_texts`` holds the text of each prompt if it is to be echoed.
    ``scoring`` means echo, log-probabilities and a single token, as benchmarks score a prompt. That token
    then always has an entry, even if it ends the text.
    """

    model: ServedModel
    requests: tuple[GenerationRequest, ...]
    # The choices of one prompt.
    num_choices: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_texts: tuple[str, ...] = ()
    scoring: bool = False
    # The number of alternatives to report for each token of the prompt.
    prompt_logprobs: int | None = None
    # How long the model stays loaded after this answer, if the request says so; negative: for ever.
    keep_alive_s: float | None = None
    # How the answers of a chat are read.
    reply: ParserOptions = field(default_factory=ParserOptions)

    @property
    def echo(self) -> bool:
        return bool(self.prompt_texts)

    @property
    def num_prompt_tokens(self) -> int:
        """Return the tokens of all prompts together."""
        return sum(len(request.prompt_ids) for request in self.requests)

    @property
    def most_tokens(self) -> int:
        """Return the tokens of prompts and answers together, if every answer has its full length."""
        answers = sum(request.max_tokens * request.num_choices for request in self.requests)
        return self.num_prompt_tokens + answers
