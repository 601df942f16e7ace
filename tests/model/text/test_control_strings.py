"""Control strings are found as one large alternation would find them, in short strides."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.model.text.control_strings import ControlStrings

STRINGS = ["<|end|>", "<|end", "<|", "<s>", "</s>", "ab", "abc", "abcd", "b", "<|é|>", "a.c*", "x" * 300]


def alternation(strings: list[str]) -> re.Pattern[str]:
    longest_first = sorted(strings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


@given(
    text=st.lists(st.sampled_from([*STRINGS, "<", "|", "a", "c", "xx", "é", "\n", " "]), max_size=60).map(
        "".join
    ),
    stride=st.integers(1, 9),
    strings=st.lists(st.sampled_from(STRINGS), unique=True),
)
def test_matches_are_those_of_one_search_whatever_the_stride(
    text: str, stride: int, strings: list[str]
) -> None:
    found = [match.span() for match in ControlStrings(strings, stride=stride).finditer(text)]
    assert found == [match.span() for match in alternation(strings).finditer(text)]


def test_each_match_is_replaced() -> None:
    strings = ControlStrings(["<|a|>", "<|ab|>"])
    assert strings.sub(lambda found: f"[{len(found)}]", "x<|ab|>y<|a|>") == "x[6]y[5]"
    assert strings.findall("<|a|><|ab|><|") == ["<|a|>", "<|ab|>"]


def test_no_strings_match_nothing() -> None:
    assert ControlStrings([]).findall("text") == []
    assert ControlStrings([""]).sub(lambda _: "!", "text") == "text"


def test_a_search_never_sees_more_than_a_stride_and_one_string(monkeypatch: pytest.MonkeyPatch) -> None:
    spans: list[tuple[int, int]] = []

    class Recording:
        def search(self, _text: str, start: int, end: int) -> None:
            spans.append((start, end))

    compiles = SimpleNamespace(escape=re.escape, compile=lambda _: Recording())
    monkeypatch.setattr("convoy.model.text.control_strings.re", compiles)
    strings = ControlStrings(["<|end|>"])
    assert strings.findall("a" * 100_000) == []
    assert max(end - start for start, end in spans) <= 16_384 + len("<|end|>")
    assert len(spans) == 7
