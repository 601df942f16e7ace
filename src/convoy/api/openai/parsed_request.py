"""Translate a body into engine requests: check limits, tokenise text, number the choices.

Tokenising a large body takes a while, so the server calls these functions on a thread of their own.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import replace
from functools import partial
from typing import Any

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.request import ChatRequest, cache_salt_of, check_room, find_room, parse_chat
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.answer_form import read_form
from convoy.api.openai.bodies import ChatBody, CompletionBody, GenerationBody, StreamOptions
from convoy.api.openai.conversation import read_conversation
from convoy.api.service import ServedModel, ServedTokenizer, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.config.durations import DURATION_FORMS, duration_s
from convoy.engine.requests.request import AnswerGrammar, GenerationRequest
from convoy.engine.requests.restrictions import check_restrictions
from convoy.errors import RequestError
from convoy.model.sampling.params import MAX_LOGIT_BIAS, MAX_LOGPROBS, SamplingParams
from convoy.model.text.grammar import Grammar

MAX_STOPS = 16
# vLLM takes as many.
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
# A value of max_tokens that means: not given.
_NO_LIMIT = -1
# No leading zeros, so that two keys never name the same token; and no more digits than an id can have.
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def read_chat(
    body: ChatBody, service: Service, options: ServeOptions, salt: bytes, *, dropped: DroppedHistory
) -> ParsedRequest:
    """Translate a chat body. ``salt`` is the caller's key's; ``dropped`` counts the calls that are left out.

    Raises `RequestError` or `UnknownModel`.
    """
    model = service.model(body.model)
    conversation = read_conversation(body, options, dropped)
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    _check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    params = _params(body, (body.top_logprobs or 0) if body.logprobs else None)
    max_tokens = _max_tokens(body, body.max_completion_tokens)
    asked = _stream_options(body)
    _check_prompt_logprobs(body)
    shared = _shared(body, model, options, params, max_tokens=max_tokens, scored=False, salt=salt)
    chat = ChatRequest(
        model=body.model,
        conversation=conversation,
        params=params,
        max_tokens=max_tokens,
        stop=shared.stop,
        num_choices=shared.num_choices,
        stream=bool(body.stream),
        grammar=read_form(body),
        caller=salt,
    )
    parsed = parse_chat(chat, service, shared.cache_salt)
    # The fields that only the APIs after OpenAI have.
    request = replace(
        parsed.requests[0],
        ignore_eos=shared.ignore_eos,
        prompt_logprobs=shared.prompt_logprobs,
        min_tokens=shared.min_tokens,
        stop_token_ids=shared.stop_token_ids,
        allowed_token_ids=shared.allowed_token_ids,
        bad_words=shared.bad_words,
        tells_prefill=asked.include_progress,
    )
    return replace(
        parsed,
        requests=(_checked(request, model),),
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage_stats,
        prompt_logprobs=body.prompt_logprobs,
        keep_alive_s=keep_alive_s(body.keep_alive),
    )


def read_completion(
    body: CompletionBody, service: Service, options: ServeOptions, salt: bytes
) -> ParsedRequest:
    """Translate a completion body. ``salt`` is that of the caller's key.

    Raises `RequestError` or `UnknownModel`.
    """
    model = service.model(body.model)
    _check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    params = _params(body, body.logprobs)
    max_tokens = _max_tokens(body, None)
    room = model.max_context
    prompts = read_prompts(body.prompt, options, room)
    encode = partial(model.tokenizer.encode, max_tokens=room)
    ids = [encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    texts: tuple[str, ...] = ()
    if body.echo:
        texts = tuple(p if isinstance(p, str) else model.tokenizer.decode(p) for p in prompts)
    return _read(
        body, model, options, prompts=ids, params=params, max_tokens=max_tokens, texts=texts, salt=salt
    )


def _read(
    body: GenerationBody,
    model: ServedModel,
    options: ServeOptions,
    *,
    prompts: list[list[int]],
    params: SamplingParams,
    max_tokens: int | None,
    salt: bytes,
    texts: tuple[str, ...] = (),
) -> ParsedRequest:
    params.check_vocabulary(model.tokenizer.vocab_size)
    asked = _stream_options(body)
    _check_prompt_logprobs(body)
    scored = bool(texts) and params.logprobs is not None
    scoring = scored and max_tokens == 1
    shared = _shared(body, model, options, params, max_tokens=max_tokens, scored=scored, salt=salt)
    grammar = _compiled(read_form(body), model, salt, shared.cache_salt)
    shared = replace(shared, ignore_eos=shared.ignore_eos or scoring, grammar=grammar)
    requests = tuple(_with_prompt(shared, ids, model) for ids in prompts)
    return ParsedRequest(
        model=model,
        requests=requests,
        num_choices=shared.num_choices,
        stream=bool(body.stream),
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage_stats,
        prompt_texts=texts,
        scoring=scoring and not body.ignore_eos,
        prompt_logprobs=body.prompt_logprobs,
        keep_alive_s=keep_alive_s(body.keep_alive),
    )


def keep_alive_s(given: float | str | None) -> float | None:
    """Return the seconds of the field: -1 for ever, None if it is not given. Raises `RequestError`."""
    if given is None:
        return None
    seconds = duration_s(given)
    if seconds is None:
        raise RequestError(
            f"keep_alive is {str(given)[:40]!r}, expected {DURATION_FORMS}",
            param="keep_alive",
            hint="0 unloads the model after the answer, and -1 keeps it",
        )
    return seconds


def _shared(
    body: GenerationBody,
    model: ServedModel,
    options: ServeOptions,
    params: SamplingParams,
    *,
    max_tokens: int | None,
    scored: bool,
    salt: bytes,
) -> GenerationRequest:
    """Return the fields that the requests of all prompts share; `_with_prompt` adds the others."""
    return GenerationRequest(
        prompt_ids=(),
        params=params,
        max_tokens=max_tokens or 0,
        open_ended=max_tokens is None,
        stop=_stops(body.stop),
        ignore_eos=bool(body.ignore_eos),
        num_choices=_num_choices(body, options),
        prompt_logprobs=_most(params.logprobs if scored else None, body.prompt_logprobs),
        cache_salt=cache_salt_of(salt, body.cache_salt),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        allowed_token_ids=_allowed(body.allowed_token_ids),
        bad_words=_bad_words(body.bad_words, model.tokenizer),
    )


def _compiled(form: Grammar | None, model: ServedModel, caller: bytes, owner: bytes) -> AnswerGrammar | None:
    if form is None:
        return None
    model.grammars.check(form, form.param)
    return model.grammars.compile(form, form.param, caller=caller, owner=owner)


def _with_prompt(shared: GenerationRequest, ids: list[int], model: ServedModel) -> GenerationRequest:
    max_tokens = find_room(model, len(ids)) if shared.open_ended else shared.max_tokens
    return _checked(replace(shared, prompt_ids=tuple(ids), max_tokens=max_tokens), model)


def _checked(request: GenerationRequest, model: ServedModel) -> GenerationRequest:
    check_restrictions(request, model.tokenizer.eos_ids, model.tokenizer.vocab_size)
    return request


def read_prompts(
    prompt: str | list[Any] | None, options: ServeOptions, room: int, name: str = "prompt"
) -> list[str | list[int]]:
    """Return ``prompt``, the field ``name``, as a list of prompts: each is text or token ids.

    Raises `RequestError`.
    """
    if prompt is None:
        raise RequestError(f"{name} is missing, expected text, token ids or a list of either", param=name)
    # Check the length first, because the checks below look at each item.
    if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
        check_room(len(prompt), room)
    whole = isinstance(prompt, str) or (bool(prompt) and all(type(item) is int for item in prompt))
    prompts = [prompt] if whole else list(prompt)
    if not prompts:
        raise RequestError(f"{name} is empty, expected at least one token", param=name)
    if len(prompts) > options.max_prompts:
        raise RequestError(
            f"{name} has {len(prompts)} prompts, and the limit is {options.max_prompts}", param=name
        )
    for index, item in enumerate(prompts):
        where = name if whole else f"{name}[{index}]"
        if isinstance(item, list):
            check_room(len(item), room)
        if not isinstance(item, str | list) or any(
            type(token) is not int for token in (item if isinstance(item, list) else ())
        ):
            raise RequestError(
                f"{where} is neither text nor a list of token ids", param=where, code="invalid_type"
            )
        if not item:
            raise RequestError(f"{where} is empty, expected at least one token", param=where)
    return prompts


def _params(body: GenerationBody, logprobs: int | None) -> SamplingParams:
    given = {
        name: value
        for name in (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        if (value := getattr(body, name)) is not None
    }
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return SamplingParams(**given, seed=seed, logit_bias=_bias(body.logit_bias), logprobs=logprobs)


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    bias = {}
    if given is not None and len(given) > MAX_LOGIT_BIAS:
        # `SamplingParams` checks this too, but only after the loop below has built every entry.
        raise RequestError(
            f"logit_bias has {len(given)} entries, expected at most {MAX_LOGIT_BIAS}", param="logit_bias"
        )
    for key, value in (given or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}, expected a token id", param="logit_bias"
            )
        bias[int(key)] = value
    return bias


def _max_tokens(body: GenerationBody, newer: int | None) -> int | None:
    older = None if body.max_tokens == _NO_LIMIT else body.max_tokens
    newer = None if newer == _NO_LIMIT else newer
    for name, value in (("max_tokens", older), ("max_completion_tokens", newer)):
        if value is not None and value < 1:
            raise RequestError(
                f"{name} is {value}, expected at least 1, or {_NO_LIMIT} for no limit", param=name
            )
    if newer is not None and older is not None and newer != older:
        raise RequestError(
            f"max_completion_tokens is {newer} and max_tokens is {older}, expected one of them",
            param="max_completion_tokens",
        )
    return older if newer is None else newer


def _num_choices(body: GenerationBody, options: ServeOptions) -> int:
    _check_range("n", body.n, 1, options.max_choices)
    return 1 if body.n is None else body.n


def _stream_options(body: GenerationBody) -> StreamOptions:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return body.stream_options or StreamOptions()


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, and the limit is {MAX_STOPS}", param="stop")
    if "" in stops:
        raise RequestError("stop has an empty string, expected at least one character", param="stop")
    return stops


def _allowed(given: list[int] | None) -> tuple[int, ...]:
    if given == []:
        raise RequestError(
            "allowed_token_ids is empty, expected at least one token id", param="allowed_token_ids"
        )
    return tuple(given or ())


def _bad_words(given: list[str] | None, tokenizer: ServedTokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, and of the word after a space if that begins with another token.

    vLLM does the same: it bans a word at the beginning of a text and within it.
    """
    if len(given or ()) > MAX_BAD_WORDS:
        raise RequestError(
            f"bad_words has {len(given or ())} words, and the limit is {MAX_BAD_WORDS}", param="bad_words"
        )
    found: dict[tuple[int, ...], None] = {}
    for index, given_word in enumerate(given or ()):
        word, where = given_word.lstrip(), f"bad_words[{index}]"
        if len(given_word) > MAX_BAD_WORD_CHARS:
            text = f"{where} has {len(given_word)} characters, and the limit is {MAX_BAD_WORD_CHARS}"
            raise RequestError(text, param=where)
        plain = tuple(tokenizer.encode_word(word))
        if not plain:
            raise RequestError(f"{where} has no token, expected a word", param=where)
        spaced = tuple(tokenizer.encode_word(" " + word))
        found[plain] = None
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            found[spaced] = None
    return tuple(found)


def _check_prompt_logprobs(body: GenerationBody) -> None:
    _check_range("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")


def _most(first: int | None, second: int | None) -> int | None:
    given = [count for count in (first, second) if count is not None]
    return max(given) if given else None


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value}, expected {low} to {high}", param=name)
