"""Turn a conversation into an engine request, in the same way for every API."""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from convoy.api.chat.parsed import ParsedRequest
from convoy.api.service import ServedModel, Service
from convoy.engine.requests.request import AnswerGrammar, GenerationRequest
from convoy.engine.requests.restrictions import check_restrictions
from convoy.errors import RequestError
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.conversation import Conversation
from convoy.model.text.formats.parser import ParserOptions
from convoy.model.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Hold a request for the assistant's next turn. ``max_tokens`` None means: the room that is left."""

    model: str | None
    conversation: Conversation
    params: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    num_choices: int = 1
    stream: bool = False
    # The form of the answer's text; the grammar of its calls comes from the tools.
    grammar: Grammar | None = None
    # The salt of the caller's own key: one caller has one grammar compiled at a time.
    caller: bytes = field(default=b"", repr=False)


def parse_chat(
    request: ChatRequest, service: Service, salt: bytes, *, prompt_field: str = "messages"
) -> ParsedRequest:
    """Return the engine's request. ``salt`` is that of its cached prefixes; see `cache_salt_of`.

    Raises `RequestError` or `UnknownModel`. A `RequestError` about the length names ``prompt_field``, and has
    the code "context_length_exceeded" and the numbers of the prompt's tokens and of the room.
    """
    model = service.model(request.model)
    conversation = request.conversation
    request.params.check_vocabulary(model.tokenizer.vocab_size)
    _check_tools(conversation, model)
    with prompt_in(prompt_field):
        prompt_ids = model.tokenizer.encode_chat(conversation, max_tokens=model.max_context)
        room = find_room(model, len(prompt_ids))
    reply = _parser_options(conversation, model, prompt_ids)
    may_think = model.tokenizer.reply_format.may_open_reasoning(prompt_ids, model.tokenizer.decode)
    grammar, reply = _form(request, reply, model, may_think=may_think, salt=salt)
    engine_request = GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        params=request.params,
        max_tokens=room if request.max_tokens is None else request.max_tokens,
        open_ended=request.max_tokens is None,
        stop=request.stop,
        num_choices=request.num_choices,
        cache_salt=salt,
        grammar=grammar,
    )
    check_restrictions(engine_request, model.tokenizer.eos_ids, model.tokenizer.vocab_size)
    return ParsedRequest(
        model=model,
        requests=(engine_request,),
        num_choices=request.num_choices,
        stream=request.stream,
        include_usage=False,
        continuous_usage=False,
        reply=reply,
    )


def cache_salt_of(own: bytes, asked: str | None) -> bytes:
    """Return the salt of a request's cached prefixes, from the caller's key and ``asked``.

    Another key's caller cannot tell from response times that a prompt was asked before under this key.
    ``asked`` separates callers that share one key.
    """
    return own if asked is None else hmac.digest(own or b"no key", asked.encode(), "sha256")


def count_prompt(request: ChatRequest, service: Service) -> int:
    """Return the tokens of a request's prompt, also if they exceed the context.

    Raises `RequestError` or `UnknownModel`.
    """
    return len(service.model(request.model).tokenizer.encode_chat(request.conversation))


@contextlib.contextmanager
def prompt_in(prompt_field: str) -> Iterator[None]:
    """Let an error about the prompt name ``prompt_field``, the client's own field for the prompt.

    The tokeniser names its argument, and the field differs by API.
    """
    try:
        yield
    except RequestError as error:
        if error.param in {"prompt", "messages"}:
            error.param = prompt_field
        raise


def find_room(model: ServedModel, num_prompt: int) -> int:
    """Return the tokens that are left for an answer. Raises `RequestError` if there are none."""
    room = model.max_context
    check_room(num_prompt + 1, room, num_prompt)
    return room - num_prompt


def check_room(num_needed: int, room: int, num_prompt: int | None = None) -> None:
    """Raise `RequestError` if a request needs more than ``room`` tokens."""
    if num_needed > room:
        num_prompt = num_needed if num_prompt is None else num_prompt
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but a request may use {room} with its answer",
            param="prompt",
            code="context_length_exceeded",
            hint="shorten the prompt",
        )


def _check_tools(conversation: Conversation, model: ServedModel) -> None:
    if (
        conversation.tools
        and conversation.choice.mode != "none"
        and not model.tokenizer.reply_format.has_calls
    ):
        raise RequestError(
            "this model's chat template has no format of calls that this server knows",
            param="tools",
            code="unsupported_parameter",
            hint="docs/api.md#tools-and-reasoning lists the formats, with models that have one",
        )


def _form(
    request: ChatRequest, reply: ParserOptions, model: ServedModel, *, may_think: bool, salt: bytes
) -> tuple[AnswerGrammar | None, ParserOptions]:
    """Return the grammar of the answer, and the options that read it.

    It is the grammar of its calls if the caller demands some, or else that of its text.
    """
    conversation, own = request.conversation, model.tokenizer.reply_format
    choice, opened = conversation.choice, conversation.continues or conversation.add_generation_prompt
    if conversation.tools and choice.mode == "required":
        tools = tuple(tool for tool in reply.tools if choice.name in {"", tool.name})
        for tool in tools:
            model.grammars.check_schema(tool.parameters, "tools")
        text = own.call_grammar(
            tools,
            parallel=choice.parallel,
            thinking=reply.thinking,
            continues=conversation.continues,
            may_think=may_think,
            opened=opened,
        )
        forced = Grammar("lark", text, param="tools", has_flag=True)
        return model.grammars.compile(forced, "tools", caller=request.caller, owner=salt), reply
    if request.grammar is None:
        return None, reply
    model.grammars.check(request.grammar, request.grammar.param)
    reply = replace(reply, formed=request.grammar.kind not in {"lark", "gbnf"})
    either = _call_or_form(request, request.grammar, reply, model, may_think=may_think, salt=salt)
    if either is not None:
        return either, reply
    grammar = own.answer_grammar(
        request.grammar,
        thinking=reply.thinking,
        continues=conversation.continues,
        may_think=may_think,
        opened=opened,
    )
    if grammar is request.grammar:
        # It holds from the first token, so the answer has no reasoning, also if the prompt has opened one.
        reply = replace(reply, thinking=False)
    return model.grammars.compile(grammar, grammar.param, caller=request.caller, owner=salt), reply


def _call_or_form(
    request: ChatRequest,
    form: Grammar,
    reply: ParserOptions,
    model: ServedModel,
    *,
    may_think: bool,
    salt: bytes,
) -> AnswerGrammar | None:
    """Return the grammar of an answer that calls a tool or has a form.

    Return None if there is nothing to call, or no such grammar. The form then holds alone.
    """
    conversation, own = request.conversation, model.tokenizer.reply_format
    continues = conversation.continues
    if not reply.calls or not own.may_call_beside(form, thinking=reply.thinking, continues=continues):
        return None
    try:
        for tool in reply.tools:
            model.grammars.check_schema(tool.parameters, "tools")
        grammar = own.call_or_answer_grammar(
            reply.tools,
            form,
            parallel=conversation.choice.parallel,
            thinking=reply.thinking,
            may_think=may_think,
            opened=conversation.add_generation_prompt,
        )
        return model.grammars.compile(grammar, form.param, caller=request.caller, owner=salt)
    except RequestError:
        # The fault may lie in a tool, which need not be called, or in the form, which is then refused alone.
        return None


def _parser_options(conversation: Conversation, model: ServedModel, prompt_ids: list[int]) -> ParserOptions:
    tokenizer, last = model.tokenizer, conversation.turns[-1]
    continues_reasoning = conversation.continues and bool(last.reasoning) and not last.content
    return ParserOptions(
        tools=conversation.tools,
        calls=bool(conversation.tools) and conversation.choice.mode != "none",
        thinking=continues_reasoning
        or tokenizer.reply_format.begins_in_reasoning(prompt_ids, tokenizer.decode),
    )
