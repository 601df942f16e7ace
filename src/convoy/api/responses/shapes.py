"""Define the response object, its items and the stream's events, in the form of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    """Hold a message's text. This server makes no annotations and no log-probabilities."""

    text: str
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    """Hold the text of a reasoning."""

    text: str


class SummaryText(msgspec.Struct, frozen=True, tag_field="type", tag="summary_text"):
    """Hold a reasoning as its own summary."""

    text: str


class MessageItem(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    """Hold the assistant's text as an output item."""

    id: str
    status: ItemStatus
    content: tuple[OutputText, ...] = ()
    role: str = "assistant"


class CallItem(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    """Hold a call of a function as an output item. A function of a namespace carries it."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus
    namespace: str | UnsetType = UNSET


class ReasoningItem(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Hold a reasoning as an output item, in ``summary`` or in ``content``."""

    id: str
    status: ItemStatus
    summary: tuple[SummaryText, ...] = ()
    content: tuple[ReasoningText, ...] | UnsetType = UNSET
    encrypted_content: str | None = None


Item = MessageItem | CallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Count the prompt tokens that were not run again. No writing of the cache is ever charged."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Count the answer's tokens that are reasoning."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    """Count the tokens of a prompt and of its answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    """Report why a response failed. ``type`` is the error's code on this server's other APIs."""

    code: str
    message: str
    type: str | None = None
    param: str | None = None


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Say why a response is incomplete."""

    reason: str = "max_output_tokens"


class ReasoningShown(msgspec.Struct, frozen=True):
    """Repeat the request's options of reasoning."""

    effort: str | None = None
    summary: str | None = None


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """Hold a response: the request's options as they were understood, and the answer so far."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: Status = "in_progress"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    instructions: str | None = None
    output: Sequence[Item] = ()
    previous_response_id: str | None = None
    parallel_tool_calls: bool = True
    tool_choice: str | Mapping[str, Any] = "auto"
    tools: Sequence[Mapping[str, Any]] = ()
    text: Mapping[str, Any]
    reasoning: ReasoningShown = ReasoningShown()
    temperature: float
    top_p: float
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    top_logprobs: int = 0
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    metadata: Mapping[str, str]
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None
    service_tier: str = "default"
    background: bool = False
    store: bool = False


class DeletedResponse(msgspec.Struct, frozen=True):
    """Confirm that a stored response is gone."""

    id: str
    object: str = "response"
    deleted: bool = True


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Hold an event of the stream. Numbers count the events of a stream from 0."""

    sequence_number: int


class _ResponseEvent(Event, frozen=True, kw_only=True):
    response: ResponseObject


class ResponseCreated(_ResponseEvent, frozen=True, tag="response.created"):
    """Begin a stream."""


class ResponseInProgress(_ResponseEvent, frozen=True, tag="response.in_progress"):
    """Report that the response runs. A silent stream repeats it."""


class ResponseCompleted(_ResponseEvent, frozen=True, tag="response.completed"):
    """End a stream whose answer is complete."""


class ResponseIncomplete(_ResponseEvent, frozen=True, tag="response.incomplete"):
    """End a stream whose answer reached its most tokens."""


class ResponseFailed(_ResponseEvent, frozen=True, tag="response.failed"):
    """End a stream that broke."""


class _ItemEvent(Event, frozen=True, kw_only=True):
    output_index: int
    item: Item


class ItemAdded(_ItemEvent, frozen=True, tag="response.output_item.added"):
    """Begin an item."""


class ItemDone(_ItemEvent, frozen=True, tag="response.output_item.done"):
    """End an item."""


class _InItem(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class _PartEvent(_InItem, frozen=True, kw_only=True):
    content_index: int = 0
    part: OutputText | ReasoningText


class PartAdded(_PartEvent, frozen=True, tag="response.content_part.added"):
    """Begin a part of an item's content."""


class PartDone(_PartEvent, frozen=True, tag="response.content_part.done"):
    """End a part of an item's content."""


class TextAdded(_InItem, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """Add to a message's text."""

    delta: str
    content_index: int = 0
    logprobs: tuple[()] = ()


class TextDone(_InItem, frozen=True, kw_only=True, tag="response.output_text.done"):
    """Repeat a message's whole text."""

    text: str
    content_index: int = 0
    logprobs: tuple[()] = ()


class ReasoningAdded(_InItem, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """Add to a reasoning's text."""

    delta: str
    content_index: int = 0


class ReasoningDone(_InItem, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """Repeat a reasoning's whole text."""

    text: str
    content_index: int = 0


class _SummaryPartEvent(_InItem, frozen=True, kw_only=True):
    summary_index: int = 0
    part: SummaryText


class SummaryPartAdded(_SummaryPartEvent, frozen=True, tag="response.reasoning_summary_part.added"):
    """Begin a part of a reasoning's summary."""


class SummaryPartDone(_SummaryPartEvent, frozen=True, tag="response.reasoning_summary_part.done"):
    """End a part of a reasoning's summary."""


class SummaryAdded(_InItem, frozen=True, kw_only=True, tag="response.reasoning_summary_text.delta"):
    """Add to the text of a reasoning's summary."""

    delta: str
    summary_index: int = 0


class SummaryDone(_InItem, frozen=True, kw_only=True, tag="response.reasoning_summary_text.done"):
    """Repeat the whole text of a reasoning's summary."""

    text: str
    summary_index: int = 0


class ArgumentsAdded(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    """Add to the arguments of a call."""

    delta: str


class ArgumentsDone(_InItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    """Repeat the whole arguments of a call."""

    name: str
    arguments: str
