"""Define the response bodies and stream chunks, in OpenAI's form."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Count the prompt tokens that were not run again, because an earlier prompt began with them."""

    cached_tokens: int


class TokenUsage(msgspec.Struct, frozen=True):
    """Count the prompt's tokens, once for all choices, and the tokens of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """Hold one alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """Hold a shown token and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Hold the log-probabilities of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """Hold one token at a position of a prompt, in vLLM's form. ``rank`` counts from 1, the best."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each token of a prompt, by token id. The first token has None: nothing predicts it.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class FunctionDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold what a chunk adds to a call's function: its name first, then pieces of its arguments."""

    name: str | None = None
    arguments: str | None = None


class CallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold what a chunk adds to a call. The first one has its id and type."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold what a chunk adds to a message."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CallDelta] | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """Hold one choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class PromptProgress(msgspec.Struct, frozen=True):
    """Tell how many tokens of a prompt have run, in llama.cpp's words; ``cache`` of them were cached."""

    total: int
    cache: int
    processed: int


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Represent one event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class AnswerFunction(msgspec.Struct, frozen=True):
    """Hold the function of a call. ``arguments`` is JSON text."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct, frozen=True):
    """Hold a complete call."""

    id: str
    function: AnswerFunction
    type: str = "function"


class AssistantMessage(msgspec.Struct, frozen=True):
    """Hold the message of a chat answer. Its content is null if it only calls tools."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnswerCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """Hold one complete choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Represent a complete chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextLogprobs(msgspec.Struct, frozen=True):
    """Hold the log-probabilities of a completion, one entry per token; a prompt's first token has None."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True):
    """Hold one choice of a completion, complete or as a part of a stream."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Represent a complete completion, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model in /v1/models. ``max_model_len`` is vLLM's word for the context."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "convoy"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """Hold the answer of GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """Hold the answer of GET /health.

    ``level`` is the weakest attestation level of a member: none, self_signed or hardware.
    """

    status: str
    reason: str
    level: str | None = None
