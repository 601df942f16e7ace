"""From a body to what the engine is asked: limits checked, text made into token ids, choices counted.

Tokenising a large body takes a while, so the server calls these on a thread of their own.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from typing import Any

from convoy.engine.request import GenerationRequest
from convoy.errors import RequestError
from convoy.model.params import MAX_LOGPROBS, SamplingParams
from convoy.serve.bodies import ChatBody, ChatMessage, CompletionBody, GenerationBody, StreamOptions
from convoy.serve.options import ServeOptions
from convoy.serve.service import ServedModel, Service

ROLES = ("system", "developer", "user", "assistant")
MAX_STOPS = 16


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request as the engine sees it: a `GenerationRequest` per prompt, choices numbered prompt-
    major.

    ``prompt_texts`` has the text of each prompt where it is to be echoed. ``scoring``: echo, log-
    probabilities and a single token, which is how benchmarks score a prompt; then that token always has an
    entry, end of text included.
    """

    model: ServedModel
    requests: tuple[GenerationRequest, ...]
    num_choices: int  # per prompt
    stream: bool
    include_usage: bool
    continuous_usage: bool
    prompt_texts: tuple[str, ...] = ()
    scoring: bool = False

    @property
    def echo(self) -> bool:
        return bool(self.prompt_texts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)


def read_chat(body: ChatBody, service: Service, options: ServeOptions) -> Asked:
    """Raises `RequestError` or `UnknownModel`."""
    model = service.model(body.model)
    if not body.messages:
        raise RequestError("messages is empty, expected at least one message", param="messages")
    messages = [
        {"role": _role(message, index), "content": _content(message, index)}
        for index, message in enumerate(body.messages)
    ]
    if body.top_logprobs is not None and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
    _check_range("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
    params = _params(body, (body.top_logprobs or 0) if body.logprobs else None)
    max_tokens = _max_tokens(body, body.max_completion_tokens)
    prompt_ids = model.tokenizer.encode_chat(messages)
    return _read(body, model, options, prompts=[prompt_ids], params=params, max_tokens=max_tokens)


def read_completion(body: CompletionBody, service: Service, options: ServeOptions) -> Asked:
    """Raises `RequestError` or `UnknownModel`."""
    model = service.model(body.model)
    _check_range("logprobs", body.logprobs, 0, MAX_LOGPROBS)
    params = _params(body, body.logprobs)
    max_tokens = _max_tokens(body, None)
    prompts = _prompts(body.prompt, options)
    ids = [model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    texts: tuple[str, ...] = ()
    if body.echo:
        texts = tuple(p if isinstance(p, str) else model.tokenizer.decode(p) for p in prompts)
    return _read(body, model, options, prompts=ids, params=params, max_tokens=max_tokens, texts=texts)


def _read(
    body: GenerationBody,
    model: ServedModel,
    options: ServeOptions,
    *,
    prompts: list[list[int]],
    params: SamplingParams,
    max_tokens: int | None,
    texts: tuple[str, ...] = (),
) -> Asked:
    params.check_vocabulary(model.tokenizer.vocab_size)
    num_choices = _num_choices(body, options)
    _check_stream(body)
    scored = bool(texts) and params.logprobs is not None
    scoring = scored and max_tokens == 1
    requests = tuple(
        GenerationRequest(
            prompt_ids=tuple(ids),
            params=params,
            max_tokens=_room(model, len(ids)) if max_tokens is None else max_tokens,
            open_ended=max_tokens is None,
            stop=_stops(body.stop),
            ignore_eos=bool(body.ignore_eos) or scoring,
            num_choices=num_choices,
            prompt_logprobs=params.logprobs if scored else None,
            cache_salt=_salt(options, body.cache_salt),
        )
        for ids in prompts
    )
    asked = body.stream_options or StreamOptions()
    return Asked(
        model=model,
        requests=requests,
        num_choices=num_choices,
        stream=bool(body.stream),
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage_stats,
        prompt_texts=texts,
        scoring=scoring and not body.ignore_eos,
    )


def _role(message: ChatMessage, index: int) -> str:
    if message.role not in ROLES:
        raise RequestError(
            f"messages[{index}].role is {message.role[:40]!r}, expected one of: {', '.join(ROLES)}",
            param=f"messages[{index}].role",
        )
    return "system" if message.role == "developer" else message.role


def _content(message: ChatMessage, index: int) -> str:
    where = f"messages[{index}].content"
    if message.content is None and message.role == "assistant":
        return ""  # OpenAI's form of a turn without text
    if message.content is None:
        raise RequestError(f"{where} is missing, expected text or a list of parts", param=where)
    if isinstance(message.content, str):
        return message.content
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text":
            raise RequestError(
                f"{where}[{number}].type is {part.type[:40]!r}, and this server takes only 'text'",
                param=f"{where}[{number}].type",
                code="unsupported_parameter",
            )
        if part.text is None:
            raise RequestError(f"{where}[{number}].text is missing", param=f"{where}[{number}].text")
        texts.append(part.text)
    return "".join(texts)


def _prompts(prompt: str | list[Any] | None, options: ServeOptions) -> list[str | list[int]]:
    """A text, a list of token ids, or a list of either, as a list of prompts."""
    if prompt is None:
        raise RequestError("prompt is missing, expected text, token ids or a list of either", param="prompt")
    whole = isinstance(prompt, str) or (bool(prompt) and all(type(item) is int for item in prompt))
    prompts = [prompt] if whole else list(prompt)
    if not prompts:
        raise RequestError("prompt is empty, expected at least one token", param="prompt")
    if len(prompts) > options.max_prompts:
        raise RequestError(
            f"prompt has {len(prompts)} prompts, and the limit is {options.max_prompts}", param="prompt"
        )
    for index, item in enumerate(prompts):
        where = "prompt" if whole else f"prompt[{index}]"
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
    for key, value in (given or {}).items():
        if not (key.isascii() and key.isdigit()):
            raise RequestError(
                f"logit_bias has the key {key[:40]!r}, expected a token id", param="logit_bias"
            )
        bias[int(key)] = value
    return bias


def _max_tokens(body: GenerationBody, newer: int | None) -> int | None:
    for name, value in (("max_tokens", body.max_tokens), ("max_completion_tokens", newer)):
        if value is not None and value < 1:
            raise RequestError(f"{name} is {value}, expected at least 1", param=name)
    if newer is not None and body.max_tokens is not None and newer != body.max_tokens:
        raise RequestError(
            f"max_completion_tokens is {newer} and max_tokens is {body.max_tokens}, expected one of them",
            param="max_completion_tokens",
        )
    return body.max_tokens if newer is None else newer


def _room(model: ServedModel, num_prompt: int) -> int:
    """Tokens left for an answer whose length was not given."""
    room = model.max_context
    if num_prompt >= room:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but a request may use {room} with its answer",
            param="prompt",
            code="context_length_exceeded",
            hint="shorten the prompt",
        )
    return room - num_prompt


def _num_choices(body: GenerationBody, options: ServeOptions) -> int:
    _check_range("n", body.n, 1, options.max_choices)
    return 1 if body.n is None else body.n


def _check_stream(body: GenerationBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")


def _salt(options: ServeOptions, asked: str | None) -> bytes:
    """Of the caller's API key: who has another key cannot see by its times what this one asked. ``asked``
    divides further, among those who come with one key.
    """
    own = b"" if options.api_key is None else hashlib.sha256(options.api_key.encode()).digest()
    return own if asked is None else hmac.digest(own or b"no key", asked.encode(), "sha256")


def _stops(given: str | list[str] | None) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop has {len(stops)} strings, and the limit is {MAX_STOPS}", param="stop")
    if "" in stops:
        raise RequestError("stop has an empty string, expected at least one character", param="stop")
    return stops


def _check_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise RequestError(f"{name} is {value}, expected {low} to {high}", param=name)
