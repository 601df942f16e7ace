"""Stop strings: found whatever the deltas, never shown, nor the start of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from convoy.errors import RequestError
from convoy.model.text.stop import StopFilter


def run(stop: list[str], deltas: list[str]) -> tuple[list[str], str | None]:
    passed = StopFilter(stop)
    shown = [passed.push(delta) for delta in deltas]
    return [*shown, passed.finish()], passed.matched


def test_a_stop_string_across_deltas_is_found_and_not_shown() -> None:
    assert run(["lo w"], ["hel", "lo", " ", "world", "!"]) == (["he", "l", "", "", "", ""], "lo w")


def test_what_may_begin_a_stop_string_is_held_back_until_it_cannot() -> None:
    assert run(["###"], ["a#", "#", "b", "##"]) == (["a", "", "##b", "", "##"], None)


def test_the_match_that_is_complete_first_wins() -> None:
    assert run(["abcd", "bc"], ["xabcd"]) == (["xa", ""], "bc")
    assert run(["abcd", "bc"], list("xabcd"))[1] == "bc"


def test_of_matches_complete_together_the_longest_wins() -> None:
    assert run(["b", "ab"], ["xab"]) == (["x", ""], "ab")
    assert run(["b", "ab"], ["x", "a", "b"]) == (["x", "", "", ""], "ab")


def test_a_stop_string_that_ends_where_it_may_not_stop_does_not_count() -> None:
    passed = StopFilter(["b", "abc"])
    assert passed.push("xab", may_stop=False) == "x"
    assert passed.push("d") == "abd", "the one that ended before does not count now either"
    assert passed.push("xa", may_stop=False) == "x"
    assert passed.push("b") == "a"
    assert passed.matched == "b", "in text that may stop it does"
    longer = StopFilter(["b", "abc"])
    assert [longer.push("ab", may_stop=False), longer.push("c"), longer.matched] == ["", "", "abc"]


def test_nothing_follows_a_match() -> None:
    assert run(["."], ["one. two", " three."]) == (["one", "", ""], ".")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="stop holds an empty string") as caught:
        StopFilter(["a", ""])
    assert caught.value.param == "stop"


@given(st.text("ab#", max_size=30), st.lists(st.text("ab#", min_size=1, max_size=4), max_size=3), st.data())
def test_how_text_is_cut_into_deltas_never_matters(text: str, stop: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    deltas = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    shown, matched = run(stop, deltas)
    ends = [(end, -len(s), s) for end in range(len(text) + 1) for s in stop if text[:end].endswith(s)]
    first = min(ends, default=None)
    assert matched == (first[2] if first else None)
    assert "".join(shown) == (text[: first[0] + first[1]] if first else text)
    for count in range(len(shown) - 1):  # nothing shown early that a later match takes back
        assert "".join(shown).startswith("".join(shown[:count]))
