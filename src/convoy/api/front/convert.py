"""Convert requests, outputs and errors to the messages of `wire.front`, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import assert_never

import msgspec
import numpy as np

from convoy import errors
from convoy.engine.outputs import (
    EmbeddingOutput,
    ErrorOutput,
    FinishOutput,
    Output,
    PrefillOutput,
    PromptOutput,
    TokenLogprob,
    TokenOutput,
)
from convoy.engine.requests.request import AnswerGrammar, GenerationRequest
from convoy.errors import ConvoyError, FrameError
from convoy.model.constraints.matcher import Matcher
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.grammar import Grammar
from convoy.wire.front import (
    MAX_EVENTS,
    MAX_PROMPT_PART,
    EmbeddingEvent,
    ErrorEvent,
    FinishEvent,
    FrontError,
    FrontEvent,
    GrammarFields,
    Logprob,
    Outputs,
    PrefillEvent,
    PromptEvent,
    RequestFields,
    SamplingFields,
    TokenEvent,
)

# The errors of an engine, a grammar, the cluster and a start. Others cross as their nearest base.
_KINDS: dict[str, type[ConvoyError]] = {
    kind.__name__: kind
    for kind in (
        ConvoyError,
        errors.InputError,
        errors.ConfigError,
        errors.ModelError,
        errors.RequestError,
        errors.CapacityError,
        errors.PlanError,
        errors.QueueFull,
        errors.PeerError,
        errors.Unavailable,
        errors.NotReady,
        errors.Draining,
        errors.StageLost,
        errors.StepLate,
        errors.CollectiveError,
        errors.LinkClosed,
    )
}
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class RemoteGrammar:
    """Name a grammar that the engine's process compiles, with the arguments of `GrammarCompiler.compile`."""

    grammar: Grammar
    param: str
    caller: bytes
    owner: bytes

    def matcher(self) -> Matcher:
        """Raise `TypeError`: only the engine's process follows answers."""
        raise TypeError("the engine's process compiles this grammar")


def to_grammar(grammar: RemoteGrammar) -> GrammarFields:
    """Return the message of a grammar."""
    own = grammar.grammar
    text = own.kind, _bytes(own.text), own.strict, own.param, own.has_flag
    return GrammarFields(*text, grammar.param, grammar.caller, grammar.owner)


def from_grammar(read: GrammarFields) -> Grammar:
    """Return the grammar of a message."""
    return Grammar(read.kind, _text(read.text), read.strict, read.field, read.has_flag)


def to_request(request: GenerationRequest, *, tells_text: bool) -> RequestFields:
    """Return the message of a request. A grammar must be a `RemoteGrammar`."""
    params = request.params
    sampling = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
    own = {field.name: getattr(request, field.name) for field in fields(GenerationRequest)}
    grammar = request.grammar
    if grammar is not None and not isinstance(grammar, RemoteGrammar):
        raise TypeError("a grammar that was compiled here cannot be sent")
    return RequestFields(
        **{
            **own,
            "params": SamplingFields(**{**sampling, "logit_bias": dict(params.logit_bias)}),
            "stop": tuple(map(_bytes, request.stop)),
            "stop_token_ids": tuple(request.stop_token_ids),
            "grammar": None if grammar is None else to_grammar(grammar),
            "tells_text": tells_text,
        }
    )


def from_request(read: RequestFields, grammar: AnswerGrammar | None) -> GenerationRequest:
    """Return the request of a message, with its compiled grammar. Raises `RequestError`."""
    own = msgspec.structs.asdict(read)
    return GenerationRequest(
        **{
            **own,
            "params": SamplingParams(**msgspec.structs.asdict(read.params)),
            "stop": tuple(map(_text, read.stop)),
            "stop_token_ids": frozenset(read.stop_token_ids),
            "grammar": grammar,
        }
    )


def to_error(error: BaseException) -> FrontError:
    """Return the message of an error. The text of an error that is not Convoy's own stays here."""
    if not isinstance(error, ConvoyError):
        return FrontError(
            "ConvoyError", f"the engine's process met an internal error: {type(error).__name__}"
        )
    kind = next(_NAMES[base] for base in type(error).__mro__ if base in _NAMES)
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    wait_s = getattr(error, "retry_after_s", None)
    hint, public = _shown(error.hint), _shown(error.public)
    return FrontError(kind, _shown(error.message) or "", hint, public, _shown(param), _shown(code), wait_s)


def from_error(read: FrontError) -> ConvoyError:
    """Return the error of a message. Raises `FrameError` for a kind outside the table."""
    kind = _KINDS.get(read.kind)
    if kind is None:
        raise FrameError("a message holds an unknown kind of error")
    if issubclass(kind, errors.RequestError):
        return kind(read.message, param=read.param, code=read.code, hint=read.hint)
    if issubclass(kind, errors.QueueFull):
        wait_s = read.retry_after_s
        return kind(read.message, hint=read.hint, public=read.public, retry_after_s=wait_s)
    return kind(read.message, hint=read.hint, public=read.public)


def to_frames(outputs: Iterable[tuple[int, Output]]) -> Iterator[Outputs]:
    """Yield the messages of outputs, each with the number of its request, in order."""
    events: list[FrontEvent] = []
    for number, output in outputs:
        for event in _to_events(number, output):
            events.append(event)
            # A part of a prompt may be large, so it ends its message.
            if len(events) == MAX_EVENTS or isinstance(event, PromptEvent):
                yield Outputs(tuple(events))
                events = []
    if events:
        yield Outputs(tuple(events))


def _to_events(number: int, output: Output) -> Iterator[FrontEvent]:
    match output:
        case TokenOutput(choice, token_id, text, logprob):
            yield TokenEvent(number, choice, token_id, text, _to_logprob(logprob))
        case FinishOutput(choice, reason, text, cached_tokens, queued_s):
            yield FinishEvent(number, choice, reason, text, cached_tokens, queued_s)
        case PromptOutput(logprobs):
            for start in range(0, max(1, len(logprobs)), MAX_PROMPT_PART):
                end = start + MAX_PROMPT_PART
                part = tuple(map(_to_logprob, logprobs[start:end]))
                yield PromptEvent(number, part, end >= len(logprobs))
        case PrefillOutput(num_done, num_cached, num_prompt):
            yield PrefillEvent(number, num_done, num_cached, num_prompt)
        case EmbeddingOutput(state):
            yield EmbeddingEvent(number, state.astype("<f4").tobytes())
        case ErrorOutput(error):
            yield ErrorEvent(number, to_error(error))


def from_event(event: FrontEvent) -> Output:
    """Return the output of an event. That of a prompt has the part of this event."""
    match event:
        case TokenEvent(_, choice, token_id, text, logprob):
            return TokenOutput(choice, token_id, text, _from_logprob(logprob))
        case FinishEvent(_, choice, reason, text, cached_tokens, queued_s):
            return FinishOutput(choice, reason, text, cached_tokens, queued_s)
        case PromptEvent(_, logprobs):
            return PromptOutput(tuple(map(_from_logprob, logprobs)))
        case PrefillEvent(_, num_done, num_cached, num_prompt):
            return PrefillOutput(num_done, num_cached, num_prompt)
        case EmbeddingEvent(_, state):
            return EmbeddingOutput(np.frombuffer(state, dtype="<f4").astype(np.float32))
        case ErrorEvent(_, error):
            return ErrorOutput(from_error(error))
        case _:
            assert_never(event)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _shown(text: str | None) -> str | None:
    """Return a text that is whole Unicode; an error may quote a client's text."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _to_logprob(one: TokenLogprob | None) -> Logprob | None:
    return None if one is None else Logprob(one.token_id, one.logprob, tuple(one.top), one.rank)


def _from_logprob(one: Logprob | None) -> TokenLogprob | None:
    return None if one is None else TokenLogprob(one.token_id, one.logprob, one.top, one.rank)
