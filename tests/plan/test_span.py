"""The span grammar, inclusive as in ds4, and the words of its refusals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import SpanError
from convoy.plan.span import Span, format_span, layers_text, parse_span


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("0:19", Span(0, 20)),
        ("20:output", Span(20, 43, output=True)),
        ("0:19,output", Span(0, 20, output=True)),
        ("0:output", Span(0, 43, output=True)),
        ("20:42", Span(20, 43)),
        ("5:5", Span(5, 6)),
        (" 5:10 ", Span(5, 11)),
    ],
)
def test_a_span_is_read_inclusively(text: str, span: Span) -> None:
    assert parse_span(text, 43) == span


def test_the_embedding_goes_with_layer_0() -> None:
    assert parse_span("0:3", 12).embed
    assert not parse_span("1:3", 12).embed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "invalid span '': expected A:B, A:output or A:B,output"),
        ("5", "expected A:B"),
        ("1:2:3", "expected A:B"),
        ("1:2,", "expected A:B"),
        ("1:2,embed", "expected A:B"),
        ("1:output,output", "expected A:B"),
        ("output", "expected A:B"),
        (":5", "start layer '' is not a number"),
        ("5:", "end layer '' is not a number"),
        ("-1:5", "start layer '-1' is not a number"),
        ("x:output", "start layer 'x' is not a number"),
        ("1:5.0", "end layer '5.0' is not a number"),
        ("1:\u0665", "is not a number"),
        ("1:" + "9" * 5000, "is not a number"),
        ("12:output", "invalid span '12:output': it starts past the last layer, 11"),
        ("3:12", "invalid span '3:12': it ends past the last layer, 11"),
        ("5:3", "invalid span '5:3': its end, layer 3, precedes its start, layer 5"),
    ],
)
def test_a_bad_span_is_named_with_what_was_expected(text: str, expected: str) -> None:
    with pytest.raises(SpanError) as caught:
        parse_span(text, 12)
    assert expected in str(caught.value)


@given(st.integers(1, 200), st.data())
def test_formatting_and_parsing_undo_each_other(num_layers: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, num_layers - 1))
    span = Span(start, data.draw(st.integers(start + 1, num_layers)), data.draw(st.booleans()))
    assert parse_span(format_span(span, num_layers), num_layers) == span


@given(st.text(alphabet="0123456789:,output -", max_size=14))
def test_any_text_is_a_span_or_a_span_error(text: str) -> None:
    try:
        span = parse_span(text, 12)
    except SpanError:
        return
    assert 0 <= span.start < span.end <= 12


def test_layers_are_worded_inclusively() -> None:
    assert layers_text(4, 5) == "layer 4"
    assert layers_text(4, 8) == "layers 4-7"
