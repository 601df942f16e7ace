"""Items become turns: what a client sends back, also from other servers."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest

from convoy.api.refusals import UnknownResponse
from convoy.api.responses.items import ItemHistory, encode_reasoning, read_items
from convoy.errors import RequestError
from convoy.model.text.conversation import ToolCall, Turn

CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "read", "arguments": '{"a":1}'}
RESULT = {"type": "function_call_output", "call_id": "call_1", "output": "text of a file"}


def read(*items: Any, earlier: tuple[Turn, ...] = ()) -> ItemHistory:
    return read_items(list(items), earlier, max_items=20)


def refused(*items: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        read(*items)
    return caught.value


def test_text_is_one_turn_of_the_user() -> None:
    assert read_items("hello", max_items=1).turns == (Turn("user", "hello"),)


def test_text_follows_the_turns_of_an_earlier_response() -> None:
    earlier = (Turn("user", "a"), Turn("assistant", "b"))
    assert read_items("c", earlier, max_items=1).turns == (*earlier, Turn("user", "c"))


@pytest.mark.parametrize("role", ["system", "developer"])
def test_developer_is_system(role: str) -> None:
    assert read({"role": role, "content": "be brief"}).turns == (Turn("system", "be brief"),)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "input_text", "text": "What "}, {"type": "input_text", "text": "is it?"}]
    item = {"type": "message", "role": "user", "content": parts}
    assert read(item).turns == (Turn("user", "What is it?"),)


def test_a_reasoning_a_text_and_calls_are_one_turn_of_the_assistant() -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "output_text", "text": "I read it."}]}
    other = {**CALL, "call_id": "call_2", "namespace": "disk"}
    history = read({"role": "user", "content": "go"}, reasoning, said, CALL, other, RESULT)
    assert history.turns == (
        Turn("user", "go"),
        Turn(
            "assistant",
            "I read it.",
            "hm",
            (ToolCall("call_1", "read", '{"a":1}'), ToolCall("call_2", "disk__read", '{"a":1}')),
        ),
        Turn("tool", "text of a file", call_id="call_1", name="read"),
    )
    assert history.dropped == ()


def test_each_step_of_an_agent_is_a_turn_of_its_own() -> None:
    said = {"role": "assistant", "content": "done"}
    second, result = {**CALL, "call_id": "call_2"}, {**RESULT, "call_id": "call_2"}
    roles = [turn.role for turn in read(CALL, RESULT, second, result, said, said).turns]
    assert roles == ["assistant", "tool", "assistant", "tool", "assistant", "assistant"]


def test_a_result_may_belong_to_a_call_of_an_earlier_response() -> None:
    earlier = (Turn("assistant", calls=(ToolCall("call_1", "read", "{}"),)),)
    assert read(RESULT, earlier=earlier).turns[-1].name == "read"


@pytest.mark.parametrize(
    "reasoning",
    [
        {"content": [{"type": "reasoning_text", "text": "long"}], "summary": [{"text": "short"}]},
        {"encrypted_content": encode_reasoning("long"), "summary": [{"text": "short"}]},
        {"encrypted_content": "of another server", "summary": [{"text": "long"}]},
        {"encrypted_content": "convoy.not base64", "summary": [{"text": "long"}]},
    ],
)
def test_a_reasoning_comes_back_from_its_fullest_form(reasoning: dict[str, Any]) -> None:
    history = read({"type": "reasoning", **reasoning}, {"role": "assistant", "content": "so"})
    assert history.turns == (Turn("assistant", "so", "long"),)


@pytest.mark.parametrize(
    "items",
    [
        [{"type": "compaction", "encrypted_content": "x"}],
        [{"type": "web_search_call", "id": "ws_1", "status": "completed"}],
        [{"no": "type"}],
        [{"type": 5}],
        [{"type": "reasoning", "summary": [], "encrypted_content": "of another server"}],
        # A reasoning that no text and no call follows.
        [{"type": "reasoning", "summary": [{"text": "hm"}]}],
    ],
)
def test_unknown_items_are_dropped_and_counted(items: list[Any]) -> None:
    history = read({"role": "user", "content": "a"}, *items, {"role": "user", "content": "b"})
    assert [turn.content for turn in history.turns] == ["a", "b"]
    assert len(history.dropped) == 1


@pytest.mark.parametrize("item", [{"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}])
def test_a_reference_stands_for_the_stored_item(item: dict[str, str]) -> None:
    said = {"type": "message", "id": "msg_1", "role": "assistant", "content": "moon"}
    history = read_items([item], max_items=20, stored=lambda found, _: {said["id"]: said}[found])
    assert history.turns == (Turn("assistant", "moon"),)
    with pytest.raises(UnknownResponse) as raised:
        read(item)
    assert (raised.value.param, raised.value.code) == ("input[0].id", "item_not_found")


def test_reasonings_in_a_row_are_joined_once() -> None:
    texts = [str(number) for number in range(40)]
    items = [{"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]} for text in texts]
    made: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code is Turn.__init__.__code__:
            made.append(frame.f_locals["reasoning"])

    sys.setprofile(note)
    try:
        (turn,) = read_items([*items, {"role": "assistant", "content": "a"}], max_items=50).turns
    finally:
        sys.setprofile(None)
    assert turn == Turn("assistant", "a", "\n".join(texts))
    # Joined one by one, each of them copies the reasoning so far into another turn.
    assert len(made) < 10
    assert made.count(turn.reasoning) == 1


def test_a_part_whose_type_is_no_text_is_dropped() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": ["list"]}, {}]
    assert read({"role": "user", "content": parts}).turns == (Turn("user", "a"),)


def test_an_unknown_part_is_dropped_and_counted() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "new_thing"}]
    history = read({"role": "user", "content": parts})
    assert (history.turns, history.dropped) == ((Turn("user", "a"),), ("new_thing",))


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"role": "wizard", "content": "x"}, "input[0].role"),
        ({"type": "message", "content": "x"}, "input[0].role"),
        ({"role": 5, "content": "x"}, "input[0].role"),
        ({"role": "user"}, "input[0].content"),
        ({"role": "user", "content": 5}, "input[0].content"),
        ({"role": "user", "content": ["x"]}, "input[0].content"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[0].content[0].text"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            "input[0].content[0].type",
        ),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[0].content[0].type"),
        ({**CALL, "call_id": None}, "input[0].call_id"),
        ({**CALL, "name": 3}, "input[0].name"),
        ({**CALL, "arguments": {}}, "input[0].arguments"),
        ({**RESULT, "call_id": None}, "input[0].call_id"),
        (RESULT, "input[0].call_id"),
        ({"type": "reasoning", "summary": "x"}, "input[0].summary"),
        ("text", "input[0]"),
    ],
)
def test_a_wrong_item_is_refused_with_its_field(item: Any, param: str) -> None:
    assert refused(item).param == param


def test_an_empty_input_and_one_over_the_limit_are_refused() -> None:
    assert refused().param == "input"
    assert refused({"type": "compaction"}).param == "input"
    assert refused(*[{"role": "user", "content": "x"}] * 21).param == "input[20]"
    many = [{"type": "input_text", "text": "x"}] * 20
    assert refused({"role": "user", "content": many}).param == "input[0].content[19]"


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "5", "no json", "[" * 5000])
def test_a_call_that_was_cut_off_is_dropped_with_its_result(arguments: str) -> None:
    history = read({"role": "user", "content": "a"}, {**CALL, "arguments": arguments}, RESULT)
    assert history.turns == (Turn("user", "a"),)
    assert history.dropped == ("function_call", "function_call_output")


@pytest.mark.parametrize("arguments", ['{"a":', "[1]", "no json", '{"a":' + "[" * 70 + "]" * 70 + "}"])
def test_a_stored_call_with_broken_arguments_is_dropped_with_its_result(arguments: str) -> None:
    whole, broken = ToolCall("call_0", "list", "{}"), ToolCall(RESULT["call_id"], "read", arguments)
    asked = Turn("user", "a")
    history = read_items([RESULT], (asked, Turn("assistant", calls=(whole, broken))), max_items=20)
    assert history.turns == (asked, Turn("assistant", calls=(whole,)))
    assert history.dropped == ("function_call", "function_call_output")
    history = read_items("go on", (asked, Turn("assistant", "", "hm", (broken,))), max_items=20)
    assert history.turns == (asked, Turn("user", "go on"))
    assert history.dropped == ("function_call", "reasoning")


def test_a_stored_call_without_arguments_has_none() -> None:
    stored = Turn("assistant", calls=(ToolCall("call_0", "list", ""),))
    assert read_items("go on", (stored,), max_items=20).turns[0].calls[0].arguments == "{}"


def test_a_call_without_arguments_has_none() -> None:
    assert read({**CALL, "arguments": ""}).turns[0].calls[0].arguments == "{}"


def test_arguments_over_a_bound_are_refused() -> None:
    large = '{"a":"' + "x" * (512 * 1024) + '"}'
    deep = '{"a":' + "[" * 70 + "]" * 70 + "}"
    for arguments in (large, deep):
        assert refused({**CALL, "arguments": arguments}).param == "input[0].arguments"
