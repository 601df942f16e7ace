"""One choice of a request while it runs: its sequence, its text so far, and what a new token does to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from convoy.engine.outputs import FinishOutput, FinishReason, Output, PromptOutput, TokenLogprob, TokenOutput
from convoy.engine.request import GenerationRequest
from convoy.engine.sequence import Sequence
from convoy.model.sampling import Sampled, prompt_logprob, sample
from convoy.model.text import TextStream, Tokenizer

Logits = npt.NDArray[np.float32]


@dataclass(slots=True, eq=False)
class Choice:
    """Turns logits into outputs. Lives on the engine's thread."""

    request: GenerationRequest
    index: int
    sequence: Sequence
    stream: TextStream
    emit: Callable[[Output], None]
    finished: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    prompt_told: bool = False

    def advance(self, logits: Logits, start: int, num_tokens: int, tokenizer: Tokenizer) -> bool:
        """Take the logits of a row that began at ``start``. Returns whether the choice is complete."""
        if self.request.prompt_logprobs is not None and self.index == 0:
            self._score_prompt(logits, start)
        if start + num_tokens < len(self.sequence.tokens) or not len(logits):
            return False
        return self._append(self._sample(logits[-1]), tokenizer)

    def finish(self, reason: FinishReason) -> None:
        """Emit what was held back and the reason, once."""
        if not self.finished:
            self.finished = True
            self.emit(FinishOutput(self.index, reason, self.stream.finish(), self.sequence.num_cached or 0))

    def _sample(self, logits: Logits) -> Sampled:
        return sample(
            logits,
            self.request.params,
            choice=self.index,
            position=len(self.sequence.tokens),
            prompt_ids=self.request.prompt_ids,
            generated_ids=self.sequence.generated_ids,
        )

    def _append(self, sampled: Sampled, tokenizer: Tokenizer) -> bool:
        if sampled.token_id in tokenizer.eos_ids and not self.request.ignore_eos:
            self.finish("stop")
            return True
        self.sequence.tokens.append(sampled.token_id)
        text = self.stream.push(sampled.token_id)
        wanted = self.request.params.logprobs is not None
        logprob = TokenLogprob(sampled.token_id, sampled.logprob, sampled.top) if wanted else None
        self.emit(TokenOutput(self.index, sampled.token_id, text, logprob))
        if self.stream.stopped:
            self.finish("stop")
        elif self.sequence.num_generated >= self.request.max_tokens:
            self.finish("length")
        return self.finished

    def _score_prompt(self, logits: Logits, start: int) -> None:
        # A sequence that was preempted computes its prompt again: score each position once.
        prompt = self.request.prompt_ids
        for offset, row in enumerate(logits):
            position = start + offset + 1
            if position == len(self.prompt_logprobs) and position < len(prompt):
                scored = prompt_logprob(row, prompt[position], self.request.prompt_logprobs or 0)
                self.prompt_logprobs.append(TokenLogprob(scored.token_id, scored.logprob, scored.top))
        if len(self.prompt_logprobs) == len(prompt) and not self.prompt_told:
            self.prompt_told = True
            self.emit(PromptOutput(tuple(self.prompt_logprobs)))
