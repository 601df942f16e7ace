"""Spans: the text form of a member's layers, inclusive as in ds4: `0:19`, `20:output`, `0:19,output`.

Members that hold one together are joined: `alpha+beta=0:19,output`.
"""

from __future__ import annotations

from dataclasses import dataclass

from convoy.errors import SpanError

GRAMMAR = "A:B, A:output or A:B,output"
EXAMPLES = (
    "layers count from 0: 0:5 is the first six, 0:5,output those and the output, 6:output the rest and it"
)
_MAX_DIGITS = 6
# Joins the ranks that a span is for: "alpha+beta=0:9,output".
JOINT = "+"


@dataclass(frozen=True, order=True)
class Span:
    """Hold layers [start, end), and whether the output is owned. The owner of layer 0 owns the embedding."""

    start: int
    end: int
    output: bool = False

    @property
    def embed(self) -> bool:
        """Return whether the embedding is owned."""
        return self.start == 0


def parse_span(text: str, num_layers: int) -> Span:
    """Read `A:B`, `A:output` (to the last layer, and the output) or `A:B,output`; layers count from 0.

    Raises SpanError with the text and the expected form.
    """
    layers, comma, owned = text.strip().partition(",")
    start_text, colon, end_text = layers.partition(":")
    if not colon or ":" in end_text or (comma and (owned != "output" or end_text == "output")):
        raise SpanError(f"invalid span {text!r}: expected {GRAMMAR}", hint=EXAMPLES)
    start = _layer(start_text, text, "start")
    last = num_layers - 1
    if start > last:
        raise SpanError(f"invalid span {text!r}: it starts past the last layer, {last}", hint=EXAMPLES)
    if end_text == "output":
        return Span(start, num_layers, output=True)
    end = _layer(end_text, text, "end")
    if end < start:
        raise SpanError(
            f"invalid span {text!r}: its end, layer {end}, precedes its start, layer {start}",
            hint="write the lower layer first",
        )
    if end > last:
        raise SpanError(
            f"invalid span {text!r}: it ends past the last layer, {last}",
            hint=f"for all from {start} on: {start}:{last}",
        )
    return Span(start, end + 1, output=bool(comma))


def _layer(digits: str, text: str, which: str) -> int:
    # isdigit() alone would accept digits of other scripts.
    if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_DIGITS):
        raise SpanError(
            f"invalid span {text!r}: {which} layer {digits!r} is not a number, expected {GRAMMAR}",
            hint=EXAMPLES,
        )
    return int(digits)


def format_span(span: Span, num_layers: int) -> str:
    """Return the text that `parse_span` reads as ``span``, in its shortest form."""
    if span.output and span.end == num_layers:
        return f"{span.start}:output"
    return f"{span.start}:{span.end - 1}{',output' if span.output else ''}"


def layers_text(start: int, end: int) -> str:
    """Return layers [start, end) in words: ``layer 4`` or ``layers 4-7``."""
    return f"layer {start}" if end - start == 1 else f"layers {start}-{end - 1}"


def split_key(key: str) -> tuple[str, ...]:
    """Return the members that a span is for:

    ``alpha`` alone, or ``alpha+beta``, rank 0 first. Raises SpanError.
    """
    names = tuple(name.strip() for name in key.split(JOINT))
    if not all(names) or len(set(names)) < len(names):
        raise SpanError(
            f"a span is for {key!r}, expected NAME or NAME+NAME with names that differ",
            hint="--layers alpha=0:5,output, or --layers alpha+beta=0:5,output",
        )
    return names
