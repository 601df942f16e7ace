"""The wire form of sampling: the head's requests to a peer that owns the output, and the peer's replies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from convoy.errors import PeerError, RequestError, StepError
from convoy.model.constraints.matcher import mask_bytes
from convoy.model.sampling.output_rows import SampleJob, SampleResult
from convoy.model.sampling.params import SamplingParams
from convoy.model.sampling.sample import Sampled
from convoy.wire.messages.control import SampleReplies, SampleReply, SampleRequest, Step


def request_of(job: SampleJob) -> SampleRequest:
    """Return the request for the owner of the output.

    Tokens are sent only if a penalty looks back. The prompt's tokens are those of the job: each once, from
    one call of `distinct` for the whole request.
    """
    params, is_sampled = job.params, job.score is None
    repeats = is_sampled and params.repetition_penalty != 1
    looks_back = repeats or (is_sampled and bool(params.presence_penalty or params.frequency_penalty))
    return SampleRequest(
        position=job.position,
        choice=job.choice,
        seed=params.seed,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=list(params.logit_bias.items()) if is_sampled else [],
        logprobs=-1 if params.logprobs is None else params.logprobs,
        score=-1 if job.score is None else job.score,
        wants_logits=job.wants_logits,
        prompt=_encode(job.prompt_ids) if repeats else b"",
        generated=_encode(job.generated_ids) if looks_back else b"",
        allowed=_encode(job.allowed),
        banned=_encode(job.banned),
        mask=job.mask,
        wants_state=job.wants_state,
    )


def job_of(request: SampleRequest, vocab_size: int) -> SampleJob:
    """Return the sampling job of a request, at the peer. Raises `StepError` for an invalid request."""
    try:
        params = SamplingParams(
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            min_p=request.min_p,
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            seed=request.seed,
            logit_bias=dict(request.logit_bias),
            logprobs=None if request.logprobs == -1 else request.logprobs,
        )
        params.check_vocabulary(vocab_size)
    except RequestError as error:
        raise StepError(f"a sample request has a parameter out of its range: {error.param}") from error
    if not -1 <= request.score < vocab_size or request.choice < 0 or request.position < 0:
        raise StepError("a sample request names a token, choice or position that does not exist")
    return SampleJob(
        params,
        request.choice,
        request.position,
        _decode(request.prompt, vocab_size),
        _decode(request.generated, vocab_size),
        None if request.score == -1 else request.score,
        request.wants_logits,
        _decode(request.allowed, vocab_size),
        _decode(request.banned, vocab_size),
        _checked_mask(request.mask, vocab_size),
        request.wants_state,
    )


def jobs_of(step: Step, vocab_size: int) -> list[SampleJob]:
    """Return the sampling jobs of a step, at the peer. Raises `StepError` for an invalid request."""
    return [job_of(request, vocab_size) for request in step.samples]


def replies_of(step: Step, outcomes: Sequence[SampleResult]) -> SampleReplies:
    """Return the replies of a step to the head, in the order of its jobs."""
    return SampleReplies(step.number, [answer_of(outcome) for outcome in outcomes])


def answer_of(outcome: SampleResult) -> SampleReply:
    """Return the reply to the head."""
    if outcome.error is not None:
        return SampleReply(0, 0.0, [], b"", outcome.error.message, 0)
    sampled = outcome.sampled
    logits, state = _bytes_of(outcome.logits), _bytes_of(outcome.state)
    return SampleReply(sampled.token_id, sampled.logprob, list(sampled.top), logits, "", sampled.rank, state)


def outcome_of(answer: SampleReply, job: SampleJob, vocab_size: int, output_size: int) -> SampleResult:
    """Return the result of a reply, at the head. ``output_size`` is the width of a final state.

    Raises `PeerError` for a reply that cannot belong to this job.
    """
    if answer.error:
        return SampleResult(
            Sampled(0), error=StepError("the owner of the output could not sample from its logits")
        )
    if job.wants_state:
        if answer != SampleReply(0, 0.0, [], b"", "", 0, answer.state):
            raise PeerError("an answer has a sample, and only a final state was asked for")
        return SampleResult(Sampled(0), state=_floats(answer.state, output_size, "final states"))
    _check_answer(answer, job, vocab_size)
    return SampleResult(
        Sampled(
            answer.token_id,
            answer.logprob,
            tuple((token, value) for token, value in answer.top),
            answer.rank,
        ),
        _floats(answer.logits, vocab_size, "logits") if job.wants_logits else None,
    )


def _check_answer(answer: SampleReply, job: SampleJob, vocab_size: int) -> None:
    tokens = [answer.token_id, *(token for token, _ in answer.top)]
    if not all(0 <= token < vocab_size for token in tokens):
        raise PeerError(f"an answer has a token outside the vocabulary of {vocab_size}")
    if job.score is None and not _may_be_sampled(answer.token_id, job):
        raise PeerError("an answer has a token that was not allowed")
    if job.score not in (None, answer.token_id):
        raise PeerError("an answer scores another token than was asked for")
    wanted = (job.params.logprobs or 0) if job.score is not None else job.params.logprobs
    num_top = min(wanted or 0, vocab_size)
    if len(answer.top) != num_top or len(set(tokens[1:])) != num_top:
        raise PeerError(f"an answer has {len(answer.top)} alternatives, expected {num_top}, all different")
    values = [answer.logprob] * (wanted is not None) + [value for _, value in answer.top]
    if not all(math.isfinite(value) for value in values):
        raise PeerError("an answer has a log-probability that is not finite")
    if not (1 <= answer.rank <= vocab_size if job.score is not None else answer.rank == 0):
        raise PeerError(
            f"an answer has the rank {answer.rank}, expected one of {vocab_size} for a score alone"
        )
    if answer.logits and not job.wants_logits:
        raise PeerError(f"an answer has {len(answer.logits)} bytes of logits, and none were asked for")
    if answer.state:
        raise PeerError(f"an answer has {len(answer.state)} bytes of a final state, and none was asked for")


def _may_be_sampled(token_id: int, job: SampleJob) -> bool:
    if job.mask and not job.mask[token_id // 8] >> token_id % 8 & 1:
        return False
    return token_id not in job.banned and (not job.allowed or token_id in job.allowed)


def _checked_mask(mask: bytes, vocab_size: int) -> bytes:
    """Return ``mask``. Raises StepError for another size, and for a token outside the vocabulary."""
    if not mask:
        return mask
    if len(mask) != mask_bytes(vocab_size):
        raise StepError(
            f"a sample request has a mask of {len(mask)} bytes, expected {mask_bytes(vocab_size)}"
        )
    if int.from_bytes(mask[vocab_size // 8 :], "little") >> vocab_size % 8:
        raise StepError(f"a sample request has a mask with a token outside the vocabulary of {vocab_size}")
    return mask


def _floats(data: bytes, size: int, of: str) -> npt.NDArray[np.float32]:
    if len(data) != 4 * size:
        raise PeerError(f"an answer has {len(data)} bytes of {of}, expected {4 * size}")
    found = np.frombuffer(data, dtype="<f4").astype(np.float32)
    if not np.isfinite(found).all():
        raise PeerError(f"an answer has {of} that are not finite")
    return found


def _bytes_of(values: npt.NDArray[np.float32] | None) -> bytes:
    return b"" if values is None else values.astype("<f4", copy=False).tobytes()


def _encode(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, dtype="<u4").tobytes()


def _decode(data: bytes, vocab_size: int) -> list[int]:
    if len(data) % 4:
        raise StepError(f"a sample request has {len(data)} bytes of tokens, expected a multiple of 4")
    tokens = np.frombuffer(data, dtype="<u4")
    if len(tokens) and int(tokens.max()) >= vocab_size:
        raise StepError(f"a sample request has a token outside the vocabulary of {vocab_size}")
    found: list[int] = tokens.tolist()
    return found
