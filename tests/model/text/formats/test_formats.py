"""Each format's replies: reasoning, text and calls, whole, cut anywhere, spelled and as tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.model.text.formats.registry import find_format
from support.examples import examples
from support.replies import (
    ROWS,
    TOOLS,
    Read,
    halves,
    joined,
    options,
    read_spelled,
    read_tokens,
)

CALL = '{"path": "a/é\\n\\"b\\".txt", "lines": [1, -2], "deep": {"on": true}}'
READ = ("read", CALL)
LIST = ("list", "{}")
# format -> replies and what they say.
REPLIES: dict[str, list[tuple[str, Read]]] = {
    "hermes": [
        ("Hello.\n\nThere.\n", ("", "Hello.\n\nThere.\n", [])),
        (
            "<think>\nHm <tool_call>?\n</think>\n\nLook:\n<tool_call>\n"
            f'{{"name": "read", "arguments": {CALL}}}\n</tool_call>\n<tool_call>\n'
            '{"arguments": {}, "name": "list"}\n</tool_call>',
            ("Hm <tool_call>?", "Look:", [READ, LIST]),
        ),
        ('<tool_call>{"name": "list"}', ("", "", [LIST])),
        (
            '<tool_call>{"name": "list", "arguments": "{\\"a\\": 1}"}</tool_call>',
            ("", "", [("list", '{"a": 1}')]),
        ),
        ("<tool_call>not JSON</tool_call> x", ("", "<tool_call>not JSON</tool_call> x", [])),
    ],
    "qwen-tags": [
        (
            'Look.\n\n<tool_call>\n<function=read>\n<parameter=path>\na/é\n"b".txt\n</parameter>\n'
            '<parameter=lines>\n[1, -2]\n</parameter>\n<parameter=deep>\n{"on": true}\n</parameter>\n'
            "</function>\n</tool_call>\n<tool_call>\n<function=list>\n</function>\n</tool_call>",
            ("", "Look.", [READ, LIST]),
        ),
        (
            "<think>why</think><tool_call><function=read><parameter=path>\n<b> </parameter x\n\n</parameter>"
            "<parameter=lines>\nno json\n</parameter></function></tool_call>",
            ("why", "", [("read", '{"path": "<b> </parameter x\\n", "lines": "no json"}')]),
        ),
        (
            '<tool_call><function=read><parameter=deep>{"on": "</parameter>"}</parameter>'
            "</function></tool_call>",
            ("", "", [("read", '{"deep": {"on": "</parameter>"}}')]),
        ),
        (
            "<tool_call><function=read><parameter=lines>\nNaN\n</parameter></function></tool_call>",
            ("", "", [("read", '{"lines": "NaN"}')]),
        ),
        ("<tool_call>odd</tool_call>", ("", "<tool_call>odd</tool_call>", [])),
        ("<tool_call><function=read><parameter=path>\ncut", ("", "", [("read", '{"path": "cut"}')])),
    ],
    "llama-json": [
        (f'{{"name": "read", "parameters": {CALL}}}', ("", "", [READ])),
        (
            f' <|python_tag|>{{"name": "read", "parameters": {CALL}}}; '
            '{"name": "list", "parameters": {}}',
            ("", " ", [READ, LIST]),
        ),
        ('{"name": "Bob", "parameters": {}}', ("", '{"name": "Bob", "parameters": {}}', [])),
        ('{"name": "list", "age": 3}', ("", '{"name": "list", "age": 3}', [])),
        ('{"answer": 42} done', ("", '{"answer": 42} done', [])),
        ("Plain {text}.", ("", "Plain {text}.", [])),
    ],
    "mistral-args": [
        (
            f"Look.[TOOL_CALLS]read[ARGS]{CALL}[TOOL_CALLS]list[CALL_ID]abc[ARGS]{{}}",
            ("", "Look.", [READ, LIST]),
        ),
        (
            f'[TOOL_CALLS][{{"name": "read", "arguments": {CALL}}}, {{"name": "list", "arguments": {{}}}}]',
            ("", "", [READ, LIST]),
        ),
        (f"[THINK]why[/THINK]so[TOOL_CALLS]read{CALL}", ("why", "so", [READ])),
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>commentary "
            "to=functions.read "
            f"<|constrain|>json<|message|>{CALL}<|call|>",
            ("Why?", "", [READ]),
        ),
        (
            "<|channel|>analysis<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>So.\n<|return|>",
            ("Why?", "So.\n", []),
        ),
        (f" to=functions.read<|channel|>commentary json<|message|>{CALL}", ("", "", [READ])),
        ("<|channel|>commentary to=functions.list<|message|>", ("", "", [LIST])),
        ("no channel at all", ("", "no channel at all", [])),
    ],
    "gemma-quotes": [
        (
            '<|channel>thought\nWhy?\n<channel|>Look.\n<|tool_call>call:read{path:<|"|>a/é\n"b".txt<|"|>,'
            "lines:[1,-2],deep:{on:true}}<tool_call|><|tool_call>call:list{}<tool_call|>",
            ("Why?", "Look.", [READ, LIST]),
        ),
        ('<|tool_call>call:read{path:<|"|>cut', ("", "", [("read", '{"path": "cut"}')])),
        (
            "<|tool_call>call:list{a:[[1],[]],b:x y,c:NaN}<tool_call|>",
            ("", "", [("list", '{"a": [[1], []], "b": "x y", "c": "NaN"}')]),
        ),
    ],
    "deepseek": [
        (
            "<think>Why?</think>Look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>read<｜tool▁sep｜>"
            f"{CALL}<｜tool▁call▁end｜><｜tool▁call▁begin｜>list<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            ("Why?", "Look.", [READ, LIST]),
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>read\n```json\n"
            f"{CALL}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            ("", "", [READ]),
        ),
    ],
    "dsml": [
        (
            'Why?</think>\n\nLook.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="read">\n'
            '<｜DSML｜parameter name="path" string="true">a/é\n"b".txt</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="lines" string="false">[1, -2]</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="deep" string="false">{"on": true}</｜DSML｜parameter>\n'
            '</｜DSML｜invoke>\n<｜DSML｜invoke name="list">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
            ("Why?", "Look.", [READ, LIST]),
        ),
        (
            '<｜DSML｜function_calls><｜DSML｜invoke name="list"><｜DSML｜parameter name="a" string="false">'
            "-Infinity</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
            ("", "", [("list", '{"a": "-Infinity"}')]),
        ),
        ("a < b and ｜DSML｜ c", ("", "a < b and ｜DSML｜ c", [])),
    ],
    "think": [("<think>\nWhy?\n</think>\n\nSo.\n", ("Why?", "So.\n", []))],
}
CASES = [(name, text, said) for name, replies in REPLIES.items() for text, said in replies]


def test_every_format_has_replies() -> None:
    assert set(REPLIES) == set(ROWS)


def thinks(text: str) -> bool:
    """Tell whether a reply begins inside a reasoning that the prompt has opened."""
    return text.startswith("Why?</think>")


@pytest.mark.parametrize(("name", "text", "said"), CASES)
def test_a_reply_is_read_as_written_and_cut_at_every_character(name: str, text: str, said: Read) -> None:
    given = options(thinking=thinks(text))
    assert joined(read_spelled(ROWS[name], [text], given)) == said
    for parts in halves(text):
        assert joined(read_spelled(ROWS[name], parts, options(thinking=thinks(text)))) == said, parts
    assert joined(read_spelled(ROWS[name], list(text), options(thinking=thinks(text)))) == said
    for _, arguments in said[2]:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("name", "text", "said"), [case for case in CASES if case[2][2]])
def test_marks_that_are_tokens_are_read_by_their_ids(name: str, text: str, said: Read, special: bool) -> None:
    given = options(thinking=thinks(text))
    assert joined(read_tokens(ROWS[name], text, given, special=special))[2] == said[2]


@pytest.mark.parametrize(("name", "text", "said"), [case for case in CASES if case[2][2]])
def test_marks_that_are_only_spelled_open_nothing_where_they_are_tokens(
    name: str, text: str, said: Read
) -> None:
    from convoy.model.text.formats.lexer import Lexer

    row = ROWS[name]
    tokens = {mark: number for number, mark in enumerate(row.marks)}
    lexemes = Lexer(row.marks, tokens, str).push(-1, text, text)
    assert "".join(one for one in lexemes if isinstance(one, str)) == text
    if name != "llama-json":
        parser = row.parser(options())
        pieces = [piece for lexeme in lexemes for piece in parser.read(lexeme)]
        assert joined([*pieces, *parser.finish()])[2] == []


@pytest.mark.parametrize("name", ROWS)
def test_without_calls_nothing_is_called(name: str) -> None:
    for text, said in REPLIES[name]:
        given = options(calls=False, thinking=thinks(text))
        assert joined(read_spelled(ROWS[name], [text], given))[2] == []
        assert joined(read_spelled(ROWS[name], [text], given))[0] == said[0]


def test_a_spelled_mark_within_a_json_string_is_text() -> None:
    text = '<tool_call>{"name": "list", "arguments": {"a": "</tool_call>"}}</tool_call>'
    for parts in halves(text):
        assert joined(read_spelled(ROWS["hermes"], parts, options()))[2] == [
            ("list", '{"a": "</tool_call>"}')
        ]


@pytest.mark.parametrize("name", ROWS)
def test_a_spelled_mark_in_a_text_with_a_form_is_text(name: str) -> None:
    row = ROWS[name]
    text = f'{{"a": "{" ".join(row.marks)}"}}'
    for parts in halves(text):
        assert joined(read_spelled(row, parts, options(formed=True))) == ("", text, [])
    if row.parser.think[0]:
        thought = f"Hm{row.parser.think[1]}\n{text}"
        given = options(thinking=True, formed=True)
        assert joined(read_spelled(row, list(thought), given)) == ("Hm", text, [])


FRAGMENTS = {
    name: [
        *row.marks,
        *('{"name": "list", ', '"arguments": ', '"parameters": {', "{}", '"a"', ":", ",", "{", "}", "[", "]"),
        *("read", "list", "\n", " ", '"', "\\", "x", "function", "\n```json\n", "<", ">", "call:list{"),
        *(
            "<function=",
            "</function>",
            "<parameter=",
            "</parameter>",
            "analysis",
            "final",
            "to=functions.list",
        ),
        *('invoke name="list">', "function_calls>", "</", 'parameter name="a" string="true">', "thought\n"),
    ]
    for name, row in ROWS.items()
}


@pytest.mark.parametrize("name", ROWS)
@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(data=st.data())
def test_any_reply_reads_the_same_however_it_is_cut(name: str, data: st.DataObject) -> None:
    parts = data.draw(st.lists(st.sampled_from(FRAGMENTS[name]), max_size=24))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    thinking = data.draw(st.booleans())
    row = ROWS[name]
    whole = joined(read_spelled(row, [text], options(thinking=thinking)))
    assert joined(read_spelled(row, pieces, options(thinking=thinking))) == whole
    assert joined(read_spelled(row, list(text), options(thinking=thinking))) == whole


def test_each_call_has_an_id_of_its_own() -> None:
    from convoy.model.text.formats.parser import make_call_id

    made = {make_call_id() for _ in range(1000)}
    assert len(made) == 1000


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|start|>assistant<|channel|>' }}", "harmony"),
        ("<|tool_call>call:", "gemma-quotes"),
        ("<｜tool▁calls▁begin｜>", "deepseek"),
        ("<｜DSML｜function_calls>", "dsml"),
        ("[TOOL_CALLS]", "mistral-args"),
        ("Environment: ipython", "llama-json"),
        ("<tool_call>\n<function=", "qwen-tags"),
        ("<tool_call>", "hermes"),
        ("<think>", "think"),
        ("{{ messages }}", "think"),
    ],
)
def test_a_format_is_found_by_the_template(template: str, name: str) -> None:
    assert find_format(template).name == name


def test_the_tools_of_the_tests_have_each_kind_of_parameter() -> None:
    assert {tool.name for tool in TOOLS} == {"read", "list"}
