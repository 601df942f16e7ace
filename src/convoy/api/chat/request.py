"""Turn a conversation into an engine request, in the same way for every API."""

from __future__ import annotations

from dataclasses import dataclass

from convoy.api.openai.parsed_request import ParsedRequest
from convoy.api.service import Service
from convoy.engine.requests.request import GenerationRequest
from convoy.model.sampling.params import SamplingParams
from convoy.model.text.conversation import Conversation, Turn
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


def parse_chat(request: ChatRequest, service: Service, salt: bytes) -> ParsedRequest:
    """Return the engine's request. ``salt`` is that of the caller's key.

    Raises `RequestError` or `UnknownModel`. A `RequestError` about the length has the code
    "context_length_exceeded" and the numbers of the prompt's tokens and of the room.
    """
    model = service.model(request.model)
    messages = [_message(turn) for turn in request.conversation.turns]
    prompt_ids = model.tokenizer.encode_chat(messages, max_tokens=model.max_context)
    room = model.max_context - len(prompt_ids)
    engine_request = GenerationRequest(
        prompt_ids=tuple(prompt_ids),
        params=request.params,
        max_tokens=room if request.max_tokens is None else request.max_tokens,
        open_ended=request.max_tokens is None,
        stop=request.stop,
        num_choices=request.num_choices,
        cache_salt=salt,
        grammar=None
        if request.grammar is None
        else model.grammars.compile(request.grammar, request.grammar.param),
    )
    return ParsedRequest(model, (engine_request,), request.num_choices, request.stream, False, False)


def _message(turn: Turn) -> dict[str, str]:
    return {"role": turn.role, "content": turn.content}
