"""Conversations in one form for all APIs: the fold of turns, and the names of tools."""

from __future__ import annotations

import time

import pytest

from convoy.model.text.conversation import ToolCall, Turn, fold_turns, is_tool_name


def test_one_system_turn_begins_and_later_ones_are_text_of_the_user() -> None:
    given = (
        Turn("system", "a"),
        Turn("system", "b"),
        Turn("user", "c"),
        Turn("assistant", "d"),
        Turn("system", "e"),
        Turn("user", "f"),
    )
    assert fold_turns(given) == (
        Turn("system", "a\n\nb"),
        Turn("user", "c"),
        Turn("assistant", "d"),
        Turn("user", "<system-reminder>\ne\n</system-reminder>\n\nf"),
    )


def test_calls_and_results_keep_turns_of_their_own() -> None:
    call = ToolCall("call_1", "read", "{}")
    given = (
        Turn("user", "a"),
        Turn("assistant", calls=(call,)),
        Turn("tool", "b", call_id="call_1", name="read"),
        Turn("tool", "c", call_id="call_1", name="read"),
        Turn("user", "d", name="ann"),
        Turn("user", "e", name="bob"),
    )
    assert fold_turns(given) == given


def test_turns_of_one_user_are_joined_in_linear_time() -> None:
    texts = [f"{number}{'x' * 2000}" for number in range(4000)]
    began_s = time.thread_time()
    (turn,) = fold_turns([Turn("user", text) for text in texts])
    assert time.thread_time() - began_s < 1.0
    assert turn.content == "\n\n".join(texts)


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("read", True),
        ("a.b:c/d-e_1", True),
        ("x" * 128, True),
        ("", False),
        ("x" * 129, False),
        ("a b", False),
    ],
)
def test_a_tools_name_has_few_characters(name: str, valid: bool) -> None:
    assert is_tool_name(name) == valid
    assert not is_tool_name(f"{name}\n")
