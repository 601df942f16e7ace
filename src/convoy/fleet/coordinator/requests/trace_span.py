"""Write a request's path into its span: counts, times and the provider; no account, text or key.

It is apart from the request because tracing decides nothing: a reader of the path needs none of it.
"""

from __future__ import annotations

from convoy.api.traces import (
    FIRST_S,
    INPUT_TOKENS,
    MAX_TOKENS,
    OUTPUT_TOKENS,
    STREAM,
    Traces,
    TraceSpan,
    Value,
)
from convoy.fleet.consumer_request import ConsumerRequest
from convoy.fleet.coordinator.bounds import BilledOutcome
from convoy.fleet.timing import Timing


def begin_span(
    traces: Traces, wanted: ConsumerRequest, timing: Timing, request_id: str, parent: str
) -> TraceSpan:
    """Begin the span of a request for a known model. ``parent`` is the traceparent that the client sent."""
    span = traces.begin(wanted.kind, wanted.model, parent, timing.age_s)
    if traces.is_on:
        span.note({"convoy.request.id": request_id, MAX_TOKENS: wanted.max_tokens, STREAM: wanted.stream})
    return span


def end_span(
    span: TraceSpan, timing: Timing, billed: BilledOutcome, values: dict[str, Value], outcome: str
) -> None:
    """Set every segment as an attribute of the span, and each segment that took time as a span of its own."""
    span.note(values)
    span.note({f"convoy.timing.{name}": us for name, us in timing.us().items()})
    if billed.completion_tokens:
        span.note({INPUT_TOKENS: billed.prompt_tokens, OUTPUT_TOKENS: billed.completion_tokens})
    if first_s := timing.seconds()["first_token"]:
        span.note({FIRST_S: first_s})
    for name, start_s, end_s in timing.parts():
        span.part(name, start_s, end_s)
    span.end(outcome)
