"""Translate the body of POST /v1/responses into a chat request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import msgspec

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.chat.request import ChatRequest, cache_salt_of, parse_chat
from convoy.api.keys.repeats import CONTEXT_ERROR
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.conversation import EFFORTS
from convoy.api.refusals import BodyTooLong, UnknownResponse
from convoy.api.responses.bodies import ResponsesBody, TextFormat
from convoy.api.responses.items import SEND_ITEM, UNKNOWN_ITEM, nothing_stored, read_items
from convoy.api.responses.shapes import ReasoningShown, ResponseObject
from convoy.api.responses.store import ResponseStore, response_of
from convoy.api.responses.tools import OfferedTools, read_tools
from convoy.api.service import Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.conversation import MAX_TOOLS, Conversation, Turn, fold_turns
from convoy.model.text.grammar import Grammar

SUMMARIES = ("auto", "concise", "detailed")
FORMATS = ("text", "json_object", "json_schema")
_ENCODED_REASONING = "reasoning.encrypted_content"
_MAX_METADATA = 16
_MAX_METADATA_KEY_CHARS = 64
_MAX_METADATA_VALUE_CHARS = 512
# For a text that each answer repeats several times, as of metadata.
_MAX_ECHOED_CHARS = 512
_ECHOED = ("prompt_cache_key", "safety_identifier", "user")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(ParsedRequest):
    """Hold a request of this API: the engine's request, and what its answer repeats or keeps."""

    # The answer before its first token, without id and time.
    shown: ResponseObject
    # The conversation without the instructions, as a later request continues it.
    turns: tuple[Turn, ...]
    # The salt of the caller's key and of ``cache_salt``, which names the owner of a stored answer.
    owner: bytes
    # The salt of the caller's key, whose share of the store the answer takes.
    key: bytes
    sources: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    # Whether the answer gives a reasoning as its own summary, and whether it adds the encoded text.
    summarise: bool = False
    encode: bool = False


class ContextFailed(RequestError):  # noqa: N818 - named after the event that reports it
    """Report that the conversation of a streamed request does not fit the context."""

    def __init__(self, error: RequestError, shown: ResponseObject) -> None:
        super().__init__(error.message, hint=error.hint, param=error.param, code=error.code)
        self.shown = shown


def read_response(
    body: ResponsesBody,
    service: Service,
    options: ServeOptions,
    salt: bytes,
    *,
    store: ResponseStore | None,
    dropped: DroppedHistory,
) -> ResponsesRequest:
    """Translate a body. ``salt`` is that of the caller's key, and ``store`` None keeps no response.

    ``dropped`` counts the items that are left out.

    Raises `RequestError`, `UnknownModel` or `UnknownResponse`. A streamed request that does not fit the
    context raises `ContextFailed`.
    """
    _check_elsewhere(body)
    key, salt = salt, cache_salt_of(salt, body.cache_salt)
    model = service.model(body.model)
    stored = nothing_stored if store is None else _StoredItems(store, salt, options.max_body_bytes).find
    earlier = _earlier(body, store, salt)
    history = read_items(body.input, earlier, max_items=options.max_messages, stored=stored)
    dropped.count("responses", history.dropped)
    offered = read_tools(
        body.tools,
        body.tool_choice,
        parallel=body.parallel_tool_calls is not False,
        max_tools=MAX_TOOLS,
    )
    request = replace(_chat_request(body, history.turns, offered), caller=key)
    shown = _shown(body, model.name, request, offered, stored=store is not None and body.store is not False)
    try:
        parsed = _parse(request, service, salt, truncate=body.truncation == "auto")
    except RequestError as error:
        if body.stream and error.code == CONTEXT_ERROR:
            raise ContextFailed(error, shown) from None
        raise
    engine_side = {one.name: getattr(parsed, one.name) for one in fields(parsed)}
    return ResponsesRequest(
        **engine_side,
        shown=shown,
        turns=history.turns,
        owner=salt,
        key=key,
        sources=offered.sources,
        summarise=shown.reasoning.summary is not None,
        encode=_ENCODED_REASONING in (body.include or ()),
    )


def _check_elsewhere(body: ResponsesBody) -> None:
    for name in ("conversation", "prompt"):
        if getattr(body, name) is not None:
            raise RequestError(
                f"this server does not support {name}",
                param=name,
                code="unsupported_parameter",
                hint="send the whole conversation as input",
            )


def _earlier(body: ResponsesBody, store: ResponseStore | None, salt: bytes) -> tuple[Turn, ...]:
    if body.previous_response_id is None:
        return ()
    param, code = "previous_response_id", "previous_response_not_found"
    if store is None:
        raise UnknownResponse(
            "this server stores no responses, so previous_response_id names none",
            param=param,
            code=code,
            hint="send the whole conversation as input; --store-responses turns the store on",
        )
    try:
        return store.turns(salt, body.previous_response_id)
    except UnknownResponse as error:
        raise UnknownResponse(
            error.message, param=param, code=code, hint="send the whole conversation as input"
        ) from None


class _StoredItems:
    """Find the items that a request refers to. Each response is decoded once.

    Together they have at most the bytes of a body, because a reference is much shorter than its item.
    """

    def __init__(self, store: ResponseStore, owner: bytes, max_bytes: int) -> None:
        self._store = store
        self._owner = owner
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes: dict[str, int] = {}
        self._outputs: dict[str, Mapping[str, Mapping[str, Any]]] = {}

    def find(self, item: str, param: str) -> Mapping[str, Any]:
        """Return the item with that id.

        Raises `UnknownResponse` with the field's name, and `BodyTooLong` once the items have too many bytes.
        """
        found = self._find(item, param)
        if item not in self._sizes:
            self._sizes[item] = len(msgspec.json.encode(found))
        self._num_bytes += self._sizes[item]
        if self._num_bytes > self._max_bytes:
            text = f"the items that input refers to have more than {self._max_bytes} bytes"
            raise BodyTooLong(f"{text}, and that is the limit", param=param)
        return found

    def _find(self, item: str, param: str) -> Mapping[str, Any]:
        response_id = response_of(item)
        try:
            if response_id not in self._outputs:
                self._outputs[response_id] = self._store.output(self._owner, response_id)
            return self._outputs[response_id][item]
        except (UnknownResponse, KeyError):
            text = f"{param} names no item that is stored for this key"
            raise UnknownResponse(text, param=param, code=UNKNOWN_ITEM, hint=SEND_ITEM) from None


def _chat_request(body: ResponsesBody, turns: tuple[Turn, ...], offered: OfferedTools) -> ChatRequest:
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        text = f"max_output_tokens is {body.max_output_tokens}, expected at least 1"
        raise RequestError(text, param="max_output_tokens")
    given = {
        name: value
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        if (value := getattr(body, name)) is not None
    }
    seed = secrets.randbits(63) if body.seed is None else body.seed
    first = () if body.instructions is None else (Turn("system", body.instructions),)
    return ChatRequest(
        model=body.model,
        conversation=Conversation(
            fold_turns((*first, *turns)),
            offered.tools,
            offered.choice,
            _variables(_effort(body)),
        ),
        params=SamplingParams(**given, seed=seed),
        max_tokens=body.max_output_tokens,
        stream=bool(body.stream),
        grammar=_grammar(body),
    )


def _variables(effort: str | None) -> dict[str, Any]:
    """Return the template's variables; templates switch reasoning by either of the last two."""
    if effort is None:
        return {}
    return {"reasoning_effort": effort, "enable_thinking": effort != "none", "thinking": effort != "none"}


def _effort(body: ResponsesBody) -> str | None:
    effort = body.reasoning.effort if body.reasoning else None
    if effort is not None and effort not in EFFORTS:
        text = f"reasoning.effort is {effort[:40]!r}, expected one of: {', '.join(EFFORTS)}"
        raise RequestError(text, param="reasoning.effort")
    return effort


def _format(body: ResponsesBody) -> TextFormat:
    given = body.text.format if body.text else None
    return given or TextFormat("text")


def _grammar(body: ResponsesBody) -> Grammar | None:
    given = _format(body)
    match given.type:
        case "text":
            return None
        case "json_object":
            return Grammar("json_object", param="text.format")
        case "json_schema" if given.schema is not None:
            schema = msgspec.json.encode(given.schema).decode()
            strict = given.strict is True
            return Grammar("json_schema", schema, strict, "text.format.schema", has_flag=True)
        case "json_schema":
            param = "text.format.schema"
            raise RequestError(f"{param}: it is missing", param=param, code="missing_required_parameter")
        case _:
            text = f"text.format.type is {given.type[:40]!r}, expected one of: {', '.join(FORMATS)}"
            raise RequestError(text, param="text.format.type")


def _shown(
    body: ResponsesBody, model: str, request: ChatRequest, offered: OfferedTools, *, stored: bool
) -> ResponseObject:
    """Return the answer before its first token: the request as it was understood."""
    truncation = body.truncation or "disabled"
    if truncation not in ("auto", "disabled"):
        text = f"truncation is {truncation[:40]!r}, expected one of: auto, disabled"
        raise RequestError(text, param="truncation")
    _check_echoed(body)
    params, given = request.params, _format(body)
    form: dict[str, Any] = {"type": given.type}
    if given.schema is not None and given.type == "json_schema":
        form |= {"name": given.name or "response", "schema": given.schema, "strict": given.strict is True}
    return ResponseObject(
        id="",
        created_at=0,
        model=model,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        parallel_tool_calls=offered.choice.parallel,
        tool_choice=offered.shown_choice,
        tools=offered.shown,
        text={"format": form},
        reasoning=ReasoningShown(_effort(body), _summary(body)),
        temperature=params.temperature,
        top_p=params.top_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        truncation=truncation,
        metadata=_metadata(body.metadata),
        prompt_cache_key=body.prompt_cache_key,
        safety_identifier=body.safety_identifier,
        user=body.user,
        store=stored,
    )


def _check_echoed(body: ResponsesBody) -> None:
    for name in _ECHOED:
        num_chars = len(getattr(body, name) or "")
        if num_chars > _MAX_ECHOED_CHARS:
            text = f"{name} has {num_chars} characters, and the limit is {_MAX_ECHOED_CHARS}"
            raise RequestError(text, param=name)


def _summary(body: ResponsesBody) -> str | None:
    """Return the kind of summary that was asked for. An unknown kind is the usual one."""
    summary = body.reasoning.summary if body.reasoning else None
    return summary if summary is None or summary in SUMMARIES else "auto"


def _metadata(given: Mapping[str, Any] | None) -> Mapping[str, str]:
    for key, value in (given or {}).items():
        if not isinstance(value, str):
            raise RequestError("metadata: expected text values", param="metadata", code="invalid_type")
        if len(key) > _MAX_METADATA_KEY_CHARS or len(value) > _MAX_METADATA_VALUE_CHARS:
            raise RequestError(
                f"metadata has a key over {_MAX_METADATA_KEY_CHARS} characters or a value over "
                f"{_MAX_METADATA_VALUE_CHARS}",
                param="metadata",
            )
    if len(given or ()) > _MAX_METADATA:
        text = f"metadata has {len(given or ())} entries, and the limit is {_MAX_METADATA}"
        raise RequestError(text, param="metadata")
    return given or {}


def _parse(request: ChatRequest, service: Service, salt: bytes, *, truncate: bool) -> ParsedRequest:
    """Return the engine's request. With ``truncate`` it leaves out as few of the oldest turns as it must.

    A cut comes before a turn of the user, so that no result loses its call. Each try renders the rest, so the
    search is binary. System turns always stay.
    """
    try:
        return _fitting(request, service, salt)
    except RequestError as error:
        turns = request.conversation.turns
        cuts = [index for index, turn in enumerate(turns) if turn.role == "user"][1:]
        if not truncate or error.code != CONTEXT_ERROR or not cuts:
            raise
    low, high, best = 0, len(cuts) - 1, None
    while low <= high:
        middle = (low + high) // 2
        kept = replace(request.conversation, turns=_from_cut(turns, cuts[middle]))
        try:
            best = _fitting(replace(request, conversation=kept), service, salt)
            high = middle - 1
        except RequestError as error:
            if error.code != CONTEXT_ERROR or middle == len(cuts) - 1:
                raise
            low = middle + 1
    assert best is not None, "the search ends with a cut that fits, or raises"
    return best


def _from_cut(turns: Sequence[Turn], cut: int) -> tuple[Turn, ...]:
    return (*(turn for turn in turns[:cut] if turn.role == "system"), *turns[cut:])


def _fitting(request: ChatRequest, service: Service, salt: bytes) -> ParsedRequest:
    """Return the engine's request. Raises `RequestError` if prompt and answer do not fit the context."""
    parsed = parse_chat(request, service, salt, prompt_field="input")
    num_prompt, room, most = parsed.num_prompt_tokens, parsed.model.max_context, request.max_tokens or 1
    if num_prompt + most > room:
        raise RequestError(
            f"the prompt has {num_prompt} tokens and its answer {most}, but the context holds {room}",
            param="max_output_tokens",
            code=CONTEXT_ERROR,
            hint="shorten the input",
        )
    return parsed
