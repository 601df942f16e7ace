"""One choice of a running request: its sequence, its text so far, and the effect of a new token."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from convoy.engine.outputs import (
    EmbeddingOutput,
    ErrorOutput,
    FinishOutput,
    FinishReason,
    Output,
    PrefillOutput,
    PromptOutput,
    TokenLogprob,
    TokenOutput,
)
from convoy.engine.requests.near_tie import can_tell, is_near_tie, with_two_best
from convoy.engine.requests.request import GenerationRequest
from convoy.engine.requests.restrictions import Restrictions, leaves_a_token
from convoy.engine.sequence import RowResult, Sequence
from convoy.engine.stats import ChoiceMeter, RequestCounts
from convoy.errors import ConvoyError, RequestError
from convoy.model.sampling.output_rows import GREEDY, SampleJob, SampleResult, distinct
from convoy.model.sampling.sample import Sampled
from convoy.model.text.stop import NoText, TextStream
from convoy.model.text.tokens import Tokenizer
from convoy.wire.messages.control import Row

_STATE = replace(GREEDY, wants_state=True)


@dataclass(slots=True, eq=False)
class Choice:
    """Turn sampled tokens into outputs, on the engine's thread."""

    request: GenerationRequest
    index: int
    sequence: Sequence
    tokenizer: Tokenizer
    stream: TextStream | NoText
    emit: Callable[[Output], None]
    group: object
    meter: ChoiceMeter
    restrictions: Restrictions
    # The distinct tokens of the prompt, if a penalty needs them.
    prompt_seen: SequenceOf[int] = ()
    finished: bool = False
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=lambda: [None])
    prompt_told: bool = False
    # The tokens of the prompt that the last `PrefillOutput` told of.
    prefill_told: int = 0
    # The first position of the running step for which the grammar and the other rules leave no token.
    _dead_end: int | None = field(default=None, init=False)

    def sample_jobs(self, row: Row, drafts: SequenceOf[int]) -> list[SampleJob]:
        """Return one sampling job for each output of ``row``.

        The row's last ``len(drafts)`` tokens are guesses.
        """
        self.meter.admitted()
        self._dead_end = None
        end = row.start + row.num_tokens
        return [self._sample_job(after + 1, drafts) for after in range(end - row.num_outputs, end)]

    def advance(self, row: Row, drafts: SequenceOf[int], outcomes: SequenceOf[SampleResult]) -> RowResult:
        """Append the sampled tokens; accept drafts in order while each equals the sampled token.

        Raises ConvoyError if a token could not be sampled.
        """
        if self.request.prompt_logprobs is not None and self.index == 0:
            self._score_prompt(outcomes, row.start)
        # A chunk of a prompt, or of a replay, that does not reach the last known token brings no new one.
        if row.start + row.num_tokens - len(drafts) < len(self.sequence.tokens) or not outcomes:
            self._tell_prefill(row.start + row.num_tokens)
            return RowResult()
        self.meter.advanced()
        if self.request.embeds:
            return self._embed(outcomes[-1])
        self._check_grammar()
        matcher = self.sequence.matcher
        num_known = len(drafts) + 1 if matcher is None else len(matcher.masks)
        num_accepted = 0
        known = outcomes[len(outcomes) - len(drafts) - 1 :][:num_known]
        # The last known outcome is no guess's: a step that samples adds a token behind the accepted ones, and
        # without it nothing would be left to schedule.
        for outcome, draft in zip(known, [*drafts[: num_known - 1], None], strict=True):
            self._check_dead_end()
            if self._append(_sampled(outcome)):
                return RowResult(num_accepted, complete=True)
            # The sampled token differs from the draft, so the outputs after it belong to another text.
            if self.sequence.tokens[-1] != draft:
                break
            num_accepted += 1
        return RowResult(num_accepted)

    def finish(self, reason: FinishReason) -> None:
        """Emit the text that was held back and the reason, once."""
        if not self.finished:
            self.finished = True
            self.meter.finished(reason)
            cached, queued_s = self.sequence.num_cached or 0, self.meter.queued_s
            self.emit(FinishOutput(self.index, reason, self.stream.finish(), cached, queued_s))

    def fail(self, error: ConvoyError | None) -> None:
        """End the choice and emit ``error``, or nothing if it is None."""
        if not self.finished:
            self.meter.finished("error")
        self.finished = True
        if error is not None:
            self.emit(ErrorOutput(error))

    def _sample_job(self, position: int, drafts: SequenceOf[int]) -> SampleJob:
        request, known = self.request, len(self.sequence.tokens)
        if position < len(request.prompt_ids):
            params = replace(request.params, logprobs=request.prompt_logprobs)
            return SampleJob(params, self.index, position, score=request.prompt_ids[position])
        if position < known:
            # Sampled already, before this sequence was preempted: the result is not used.
            return GREEDY
        if request.embeds:
            return _STATE
        params = with_two_best(request.params) if self._watches_ties else request.params
        job = SampleJob(params, self.index, position)
        if request.params.reshapes:
            generated = [*self.sequence.generated_ids, *drafts[: position - known]]
            job = replace(job, prompt_ids=self.prompt_seen, generated_ids=generated)
        matcher = self.sequence.matcher
        if matcher is not None:
            # Behind the last mask nothing is looked at; see `advance`.
            job = replace(job, mask=matcher.masks[min(position - known, len(matcher.masks) - 1)])
        if self.restrictions:
            allowed, banned = self._restrict(position, drafts[: position - known])
            job = replace(job, allowed=allowed, banned=banned)
            if job.mask and self._dead_end is None and not leaves_a_token(job.mask, allowed, banned):
                self._dead_end = position
        return job

    def _restrict(self, position: int, drafts: SequenceOf[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tokens, num_prompt = self.sequence.tokens, self.sequence.num_prompt
        start = max(num_prompt, len(tokens) - self.restrictions.reach)
        return self.restrictions.next(position - num_prompt, [*tokens[start:], *drafts])

    @property
    def _watches_ties(self) -> bool:
        free = not self.restrictions and self.sequence.matcher is None
        return self.sequence.near_tie > 0 and can_tell(self.request.params) and free

    def _check_grammar(self) -> None:
        # The masks of a failed grammar allow only the end of text, which would look like a complete answer.
        matcher = self.sequence.matcher
        if matcher is not None and matcher.failed:
            raise _too_much_work()

    def _check_dead_end(self) -> None:
        if self._dead_end == len(self.sequence.tokens):
            raise RequestError(
                "none of the tokens that the grammar allows here may be sampled",
                param="grammar",
                hint="loosen allowed_token_ids, bad_words or min_tokens",
            )

    def _append(self, sampled: Sampled) -> bool:
        request = self.request
        if self._watches_ties:
            self.sequence.num_near_ties += is_near_tie(sampled, self.sequence.near_tie)
        matcher = self.sequence.matcher
        # Behind a complete answer a grammar allows nothing but its end, so `ignore_eos` cannot go on there.
        is_eos = sampled.token_id in self.tokenizer.eos_ids and not (request.ignore_eos and matcher is None)
        if is_eos or sampled.token_id in request.stop_token_ids:
            self.finish("stop")
            return True
        if matcher is not None and not matcher.consume(sampled.token_id):
            raise _too_much_work()
        self.sequence.tokens.append(sampled.token_id)
        may_stop = self.sequence.num_generated > request.min_tokens
        text = self.stream.push(sampled.token_id, may_stop=may_stop)
        num_top = request.params.logprobs
        wanted = num_top is not None
        logprob = TokenLogprob(sampled.token_id, sampled.logprob, sampled.top[:num_top]) if wanted else None
        self.emit(TokenOutput(self.index, sampled.token_id, text, logprob))
        if self.stream.stopped or (matcher is not None and matcher.complete):
            self.finish("stop")
        elif self.sequence.num_generated >= request.max_tokens or self._at_the_wall():
            self.finish("length")
        return self.finished

    def _embed(self, outcome: SampleResult) -> RowResult:
        if outcome.error is not None:
            raise outcome.error
        assert outcome.state is not None, "the job asked for a state"
        self.emit(EmbeddingOutput(outcome.state))
        self.finish("stop")
        return RowResult(complete=True)

    def _at_the_wall(self) -> bool:
        return len(self.sequence.tokens) >= self.sequence.wall

    def _tell_prefill(self, num_done: int) -> None:
        # A replay after a loss or a preemption runs what was told before, and the answer too.
        num_prompt = len(self.request.prompt_ids)
        is_new = self.prefill_told < num_done <= num_prompt and len(self.sequence.tokens) == num_prompt
        if self.request.tells_prefill and self.index == 0 and is_new:
            self.prefill_told = num_done
            self.emit(PrefillOutput(num_done, self.sequence.num_cached or 0, num_prompt))

    def _score_prompt(self, outcomes: SequenceOf[SampleResult], start: int) -> None:
        # A sequence that was preempted computes its prompt again: score each position once.
        prompt = self.request.prompt_ids
        for position, outcome in enumerate(outcomes, start + 1):
            if position == len(self.prompt_logprobs) and position < len(prompt):
                self.prompt_logprobs.append(_scored(_sampled(outcome)))
        if len(self.prompt_logprobs) == len(prompt) and not self.prompt_told:
            self.prompt_told = True
            self.emit(PromptOutput(tuple(self.prompt_logprobs)))


def make_choices(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    emit: Callable[[Output], None],
    *,
    share_across_keys: bool,
    counts: RequestCounts | None = None,
) -> list[Choice]:
    """Return all choices of a request, as one group with waiting sequences; ``counts`` records their ends."""
    counts = counts or RequestCounts()
    salt = b"" if share_across_keys else request.cache_salt
    group = object()
    seen = distinct(request.prompt_ids) if request.params.repetition_penalty != 1 else ()
    restrictions = Restrictions.of(request, tokenizer.eos_ids)
    # Nothing here may look at the tokens before the one that is sampled.
    feeds = not (request.params.reshapes or restrictions or request.embeds or request.grammar is not None)
    choices = []
    for index in range(request.num_choices):
        all_outputs = request.prompt_logprobs is not None and index == 0
        matcher = None if request.grammar is None else request.grammar.matcher()
        sequence = Sequence(
            *(request.prompt_ids, request.max_tokens),
            all_outputs=all_outputs,
            salt=salt,
            matcher=matcher,
            feeds=feeds and not all_outputs,
        )
        stream = TextStream(tokenizer, request.stop) if request.tells_text or request.stop else NoText()
        meter = ChoiceMeter(counts, 0 if index else len(request.prompt_ids))
        choices.append(
            Choice(request, index, sequence, tokenizer, stream, emit, group, meter, restrictions, seen)
        )
    return choices


def _too_much_work() -> RequestError:
    return RequestError("the grammar took more work for one token than its limit", param="grammar")


def _scored(sampled: Sampled) -> TokenLogprob:
    return TokenLogprob(sampled.token_id, sampled.logprob, sampled.top, sampled.rank)


def _sampled(outcome: SampleResult) -> Sampled:
    if outcome.error is not None:
        raise outcome.error
    return outcome.sampled
