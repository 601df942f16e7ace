"""Read a consumer's body as far as the coordinator must know it: its possible cost and its routing."""

from __future__ import annotations

import codecs
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from convoy.api.body.body_shape import check_shape
from convoy.api.refusals import BodyTooLong
from convoy.config.table import FLEET_ANSWER_TOKENS
from convoy.config.type_resolution import resolved
from convoy.crypto.keys import prefixed
from convoy.crypto.sealed.request import MAX_SEALED_BYTES, sealed_size
from convoy.errors import RequestError
from convoy.fleet.apis.api import Fields, FleetApi
from convoy.fleet.apis.table import APIS
from convoy.fleet.books.price import Price
from convoy.fleet.capacity import MAX_TEMPLATE_TOKENS
from convoy.wire.fleet.messages import Kind

# The limit of one answer.
MAX_TOKENS = 1 << 20
MAX_CHOICES = 128
# The tag covers this much of the prompt's beginning.
_TAGGED_BYTES = 2048
# The average of text. It is used for routing, and for clients that leave an answer.
BYTES_PER_TOKEN = 4
_MAX_MODEL_CHARS = 255
# All names of a limit. Some engines prefer one of them to another, so they get no more than one.
_LIMITS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("n_predict", "num_predict", "max_new_tokens"),
)
# This value of max_tokens counts as if none was given.
_NO_LIMIT = -1
# The divisor of a prompt's price that is charged for tokenizing it.
_REFUSED_SHARE = 16
_SALT_LABEL = b"convoy cache salt v1"


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Hold the price of a model, and its defaults."""

    price: Price = field(default_factory=Price)
    # The limit of a request that names none.
    default_max_tokens: int = FLEET_ANSWER_TOKENS


@dataclass(frozen=True, slots=True)
class ConsumerRequest:
    """Hold a request as the coordinator counts it.

    ``body`` is the body for the provider. ``most_prompt_tokens`` is held for the prompt. ``body_bytes`` is
    the size of the body as it came, or the most that it may be if it is sealed.
    """

    kind: Kind
    model: str
    stream: bool
    # The limit of all choices together.
    max_tokens: int
    # A guess from the body's bytes.
    prompt_tokens: int
    most_prompt_tokens: int
    body_bytes: int
    tag: bytes
    body: bytes

    # Every formatted form leaves the prompt out.
    def __repr__(self) -> str:
        return f"ConsumerRequest({self.kind}, {len(self.body)} bytes)"


def read_consumer_request(
    data: bytes, kind: Kind, account: str, models: Mapping[str, ModelOptions], cache_key: bytes = b""
) -> ConsumerRequest:
    """Return the request. Raises `RequestError` naming the field; the provider judges all other fields.

    ``cache_key`` is a secret. From it ``account`` gets the salt under which an engine keeps its prefixes.
    """
    data = data.removeprefix(codecs.BOM_UTF8)
    check_shape(data)
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RequestError("the body is not valid JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise RequestError("the body is JSON, but not an object", code="invalid_json")
    model = body.get("model")
    if not isinstance(model, str) or not 1 <= len(model) <= _MAX_MODEL_CHARS or not model.isprintable():
        raise RequestError("model: expected the name of a model", param="model")
    api = APIS[kind]
    api.check(body)
    stream = (body.get("stream") or False) and api.generates
    if not isinstance(stream, bool):
        raise RequestError("stream: expected true or false", param="stream")
    options = models.get(model) or ModelOptions()
    each, choices = _each(body, api, options.default_max_tokens), _choices(body, api)
    fields: dict[str, object] = {
        name: value for name, value in fields_of(data).items() if name not in _LIMITS
    }
    if api.generates:
        fields[api.limits[-1]] = each
    if cache_key:
        fields["cache_salt"] = _salt(cache_key, account, body.get("cache_salt"))
    beginning = msgspec.json.encode(body.get(api.prompt))[:_TAGGED_BYTES]
    return ConsumerRequest(
        kind=kind,
        model=model,
        stream=stream,
        max_tokens=each * choices,
        prompt_tokens=max(1, len(data) // BYTES_PER_TOKEN),
        # A token has a byte or more. Each provider's offer bounds the tokens that a chat template adds.
        most_prompt_tokens=len(data) + MAX_TEMPLATE_TOKENS,
        body_bytes=len(data),
        tag=hashlib.sha256(f"{account}\n{model}\n".encode() + beginning).digest(),
        body=_bounded(msgspec.json.encode(fields)),
    )


def refused_prompt_tokens(prompt_tokens: int) -> int:
    """Return the charge for a prompt that an engine only tokenized, to count it or to refuse it."""
    return max(1, prompt_tokens // _REFUSED_SHARE)


def fields_of(data: bytes) -> Fields:
    """Return each value of a JSON object as it was written: re-encoded, a number may be far longer."""
    return msgspec.json.decode(data, type=resolved(Fields))


def _bounded(body: bytes) -> bytes:
    size = sealed_size(len(body))
    if size > MAX_SEALED_BYTES:
        raise BodyTooLong(f"the body has {size} bytes once sealed, and the limit is {MAX_SEALED_BYTES}")
    return body


def _salt(cache_key: bytes, account: str, own: object) -> str:
    """Return an account's salt, which others cannot know. A client's own salt divides the account further."""
    said = b"" if own is None else msgspec.json.encode(own)
    return hmac.digest(cache_key, prefixed(_SALT_LABEL, account.encode(), said), "sha256").hex()


def _each(body: dict[str, Any], api: FleetApi, default: int) -> int:
    """Return the limit of one answer."""
    if not api.generates:
        return 0
    for name in _LIMITS if api.is_strict else ():
        # Left out, another name would make the answer shorter or longer than was asked for.
        if name not in api.limits and body.get(name) not in (None, _NO_LIMIT):
            raise RequestError(
                f"this server does not support {name}",
                param=name,
                code="unsupported_parameter",
                hint="use max_tokens",
            )
    for name in api.limits:
        value = body.get(name)
        if value in (None, _NO_LIMIT):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_TOKENS:
            raise RequestError(f"{name}: expected 0 to {MAX_TOKENS}", param=name)
        return value
    if api.needs_limit:
        raise RequestError(f"{api.limits[-1]}: field required", param=api.limits[-1])
    return default


def _choices(body: dict[str, Any], api: FleetApi) -> int:
    """Return the number of answers to all prompts together."""
    count = 1
    for name in api.multipliers:
        value = body.get(name)
        if value is None:
            continue
        if name == "prompt":
            count *= _prompts(value)
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_CHOICES:
            raise RequestError(f"{name}: expected 1 to {MAX_CHOICES}", param=name)
        count = max(count, value)
    return count


def _prompts(given: object) -> int:
    """Return the number of prompts: a list of token ids is one."""
    if not isinstance(given, list) or not any(isinstance(one, str | list) for one in given):
        return 1
    if len(given) > MAX_CHOICES:
        raise RequestError(f"prompt: {len(given)} prompts, at most {MAX_CHOICES}", param="prompt")
    return len(given)
