"""The bodies and stream chunks that clients get, as OpenAI shapes them."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many of the prompt's tokens were not run again, because an earlier prompt began the same."""

    cached_tokens: int


class TokenUsage(msgspec.Struct, frozen=True):
    """Tokens of the prompt, counted once however many choices, and of all answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    """A shown token and its alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class PromptLogprob(msgspec.Struct, frozen=True):
    """One token at a position of a prompt, in vLLM's form. ``rank`` counts from 1, the best."""

    logprob: float
    rank: int
    decoded_token: str


# One entry for each token of a prompt, by token id; the first token has none.
PromptLogprobs = list[dict[int, PromptLogprob] | None]


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a chunk adds to a message."""

    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, frozen=True):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a chat stream."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class AssistantMessage(msgspec.Struct, frozen=True):
    """The answer."""

    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One complete choice."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole chat answer."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a completion, one entry per token; a prompt's first has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True):
    """One choice of a completion, whole or as a part of a stream."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class TextCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or one event of its stream."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """An entry of /v1/models; ``max_model_len`` is vLLM's word for the context."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "convoy"
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    """GET /health. ``level``: the weakest that was proved of a member (none, self_signed, hardware)."""

    status: str
    reason: str
    level: str | None = None
