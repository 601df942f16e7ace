"""Serve vLLM's /tokenize and /detokenize: the tokens of a prompt or a chat, and the text of tokens."""

from __future__ import annotations

import msgspec

from convoy.api.body.fields import Endpoint, refuse_unserved
from convoy.api.chat.request import prompt_in
from convoy.api.listen.options import ServeOptions
from convoy.api.openai.bodies import ChatBody, convert_object, decode_object
from convoy.api.openai.conversation import read_conversation
from convoy.api.openai.token_text import TokenText
from convoy.api.service import ServedModel, Service
from convoy.api.telemetry.dropped import DroppedHistory
from convoy.errors import RequestError

# The fields that change a prompt's tokens. All others ask for an answer, and there is none.
_PROMPT_FIELDS = (
    *("prompt", "messages", "tools", "tool_choice", "reasoning_effort", "add_special_tokens"),
    *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs"),
    *("documents", "truncate_prompt_tokens"),
)


class TextBody(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the body of POST /tokenize with a prompt."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody, frozen=True, kw_only=True):
    """Hold the body of POST /tokenize with the messages of a chat. Only the fields of a prompt are read."""

    return_token_strs: bool | None = None


class TokensBody(msgspec.Struct, frozen=True, kw_only=True):
    """Hold the body of POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Hold the answer of POST /tokenize. ``token_strs`` is null unless the request asks for it."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, frozen=True):
    """Hold the answer of POST /detokenize, under vLLM's name for the text."""

    prompt: str


def tokenize(data: bytes, service: Service, options: ServeOptions, *, dropped: DroppedHistory) -> Tokens:
    """Return the tokens that a completion of the body's prompt, or a chat of its messages, begins with.

    ``dropped`` counts the calls that are left out.

    Raises `RequestError`, also for more tokens than the context, or `UnknownModel`.
    """
    raw = decode_object(data)
    is_chat = "messages" in raw
    kind: type[TokenizeChatBody | TextBody] = TokenizeChatBody if is_chat else TextBody
    endpoint: Endpoint = "chat" if is_chat else "completion"
    given = {name: raw[name] for name in _PROMPT_FIELDS if name in raw}
    refuse_unserved(given, frozenset(kind.__struct_fields__), endpoint)
    given |= {name: raw[name] for name in ("model", "return_token_strs") if name in raw}
    body: TokenizeChatBody | TextBody = convert_object(given, kind)
    model = service.model(body.model)
    ids = _encode(body, model, options, dropped)
    texts = None
    if body.return_token_strs:
        text = TokenText(model.tokenizer)
        texts = [text.text_of(token_id) for token_id in ids]
    return Tokens(len(ids), model.max_context, ids, texts)


def detokenize(data: bytes, service: Service, options: ServeOptions) -> Detokenized:  # noqa: ARG001
    """Return the text of the body's tokens, with special tokens by their names.

    Raises `RequestError` for ids outside the vocabulary and for more ids than the context, or `UnknownModel`.
    """
    body = convert_object(decode_object(data), TokensBody)
    model = service.model(body.model)
    num_tokens, vocab_size = len(body.tokens), model.tokenizer.vocab_size
    if num_tokens > model.max_context:
        raise RequestError(
            f"tokens has {num_tokens} ids, and the limit is {model.max_context}",
            param="tokens",
            code="context_length_exceeded",
        )
    for index, token_id in enumerate(body.tokens):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"tokens[{index}] is {token_id}, expected 0 to {vocab_size - 1}", param=f"tokens[{index}]"
            )
    return Detokenized(model.tokenizer.decode(body.tokens, skip_special_tokens=False))


def _encode(
    body: TextBody | TokenizeChatBody, model: ServedModel, options: ServeOptions, dropped: DroppedHistory
) -> list[int]:
    room = model.max_context
    if isinstance(body, TokenizeChatBody):
        with prompt_in("messages"):
            return model.tokenizer.encode_chat(read_conversation(body, options, dropped), max_tokens=room)
    ids = model.tokenizer.encode(body.prompt, max_tokens=room)
    if body.add_special_tokens:
        return ids
    # `encode_word` has no limit of its own, so it follows `encode`.
    return model.tokenizer.encode_word(body.prompt)
