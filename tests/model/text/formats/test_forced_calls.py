"""Grammars of forced calls: whatever random weights draw is a valid call, in every format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from convoy.errors import RequestError
from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.text.conversation import Tool
from convoy.model.text.formats.lexer import Lexer
from convoy.model.text.formats.registry import FormatRow, ReplyFormat
from convoy.model.text.grammar import Grammar
from convoy.model.text.pieces import Piece
from support.byte_marks import EOS, ByteMarks
from support.cases import cases
from support.examples import examples
from support.replies import ROWS, SCHEMA, TOOLS, Read, joined, options

CALLING = [name for name, row in ROWS.items() if row.grammar is not None]
# Characters that end a value or a string: random text ends soon if they are likely.
CLOSING = frozenset(b'"}]<,')
# Texts that end a free text, which single characters hardly ever spell by chance.
ENDS = {"qwen-tags": b"\n</parameter>\n", "dsml": b"</", "harmony": b"<|end|>"}
MAX_TOKENS = 1500


def draw(text: str, vocabulary: ByteMarks, end: bytes, chance: random.Random) -> list[int] | None:
    """Return the tokens of one reply, drawn evenly but for what closes; None if it is too long."""
    matcher = GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools").matcher()
    ids: list[int] = []
    closing: list[int] = []
    while len(ids) < MAX_TOKENS:
        bits = np.unpackbits(np.frombuffer(matcher.native.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits[: vocabulary.vocab_size]).tolist()
        likely = [token for token in allowed if token in CLOSING or token >= EOS]
        if not closing and chance.random() < 0.05:
            closing = list(end)
        token = chance.choice(likely if likely and chance.random() < 0.5 else allowed)
        if closing:
            wanted = closing.pop(0)
            token = wanted if wanted in allowed else token
        if token == EOS:
            return ids
        assert matcher.consume(token)
        ids.append(token)
        if matcher.complete:
            return ids
    return None


def read(
    row: FormatRow,
    vocabulary: ByteMarks,
    ids: list[int],
    *,
    thinking: bool = False,
    tools: Sequence[Tool] = TOOLS,
) -> Read:
    """Read a reply with special tokens as marks, as `api.chat.reply` does."""
    lexer = Lexer(row.marks, vocabulary.tokens, lambda _: "")
    parser = row.parser(options(tools=tools, thinking=thinking))
    pieces: list[Piece] = []
    # Bytes are no characters, and no format looks into them: read each run of text at once.
    run = b""
    for token in [*ids, None]:
        if token is not None and token < EOS:
            run += bytes([token])
            continue
        shown = run.decode("utf-8", "replace")
        for lexeme in lexer.push(-1, shown, shown):
            pieces += parser.read(lexeme)
        run = b""
        for lexeme in lexer.finish("") if token is None else lexer.push(token, "", ""):
            pieces += parser.read(lexeme)
    return joined([*pieces, *parser.finish()])


def check(arguments: dict[str, Any]) -> None:
    """Check the arguments of the tool ``read`` against its schema."""
    assert isinstance(arguments["path"], str)
    assert isinstance(arguments["lines"], list)
    assert all(type(line) is int for line in arguments["lines"])
    if "deep" in arguments:
        assert type(arguments["deep"]["on"]) is bool
    if "mode" in arguments:
        assert arguments["mode"] in {"fast", "slow"}


def draw_calls(name: str, *, spelled: bool, seed: int) -> tuple[int, int]:
    """Draw a reply, check it, and return the number of its calls and 1 if it was too long."""
    row = ROWS[name]
    vocabulary = ByteMarks(row, spelled=spelled)
    chance = random.Random(seed)
    tools, parallel = chance.choice([TOOLS, TOOLS[:1]]), chance.random() < 0.5
    form = ReplyFormat(row, vocabulary.tokens)
    ids = draw(
        form.call_grammar(tools, parallel=parallel, thinking=False), vocabulary, ENDS.get(name, b""), chance
    )
    if ids is None:
        return 0, 1
    _, text, calls = read(row, vocabulary, ids, thinking=False)
    assert text.strip() == ""
    assert calls
    assert parallel or len(calls) == 1
    for called, arguments in calls:
        assert called in {tool.name for tool in tools}
        value = json.loads(arguments)
        assert isinstance(value, dict)
        if called == "read":
            check(value)
    return len(calls), 0


@pytest.mark.parametrize("spelled", cases([False, True], bool))
@pytest.mark.parametrize("name", CALLING)
def test_whatever_is_drawn_is_a_valid_call(name: str, spelled: bool) -> None:
    results = [draw_calls(name, spelled=spelled, seed=seed) for seed in range(7)]
    assert sum(num_calls for num_calls, _ in results) >= 3


@pytest.mark.parametrize("name", [name for name in CALLING if name != "harmony"])
def test_a_forced_call_comes_after_the_reasoning_that_the_prompt_has_opened(name: str) -> None:
    row = ROWS[name]
    vocabulary = ByteMarks(row, spelled=False)
    form = ReplyFormat(row, vocabulary.tokens)
    text = form.call_grammar(TOOLS[1:], parallel=False, thinking=True)
    matcher = GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools").matcher()
    for token in [*b"free { text\n", vocabulary.tokens[row.parser.think[1]]]:
        assert matcher.consume(token)
    assert not matcher.consume(ord("~"))


def test_a_strict_tool_with_an_unknown_keyword_is_refused_and_a_lenient_one_is_not() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string"}}, "dependentSchemas": {"a": {}}}
    vocabulary = ByteMarks(ROWS["hermes"], spelled=False)
    form = ReplyFormat(ROWS["hermes"], vocabulary.tokens)
    for strict in (False, True):
        tools = (Tool("odd", "", odd, strict),)
        text = form.call_grammar(tools, parallel=True, thinking=False)
        if strict:
            with pytest.raises(RequestError, match="dependentSchemas"):
                GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools")
        else:
            GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools")


def test_options_of_the_compiler_in_a_schema_are_the_servers() -> None:
    vocabulary = ByteMarks(ROWS["hermes"], spelled=False)
    form = ReplyFormat(ROWS["hermes"], vocabulary.tokens)
    tools = (Tool("read", "", {**SCHEMA, "x-guidance": {"lenient": False, "no_such_option": 1}}),)
    text = form.call_grammar(tools, parallel=True, thinking=False)
    assert "no_such_option" not in text


@pytest.mark.parametrize("kind", ["object", "array"])
@pytest.mark.parametrize("name", CALLING)
def test_the_grammar_of_a_nested_schema_grows_with_its_depth_alone(name: str, kind: str) -> None:
    def num_letters(depth: int) -> int:
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            inner = {"properties": {"a": schema}} if kind == "object" else {"items": schema}
            schema = {"type": kind, **inner}
        form = ReplyFormat(ROWS[name], {})
        tools = (Tool("deep", "", {"type": "object", "properties": {"a": schema}}),)
        return len(form.call_grammar(tools, parallel=False, thinking=False))

    assert num_letters(12) - num_letters(8) <= 2 * (num_letters(8) - num_letters(4))


class Counted(Mapping[str, Any]):
    """Hold a schema and count how often its type is read."""

    def __init__(self, schema: dict[str, Any]) -> None:
        self._schema = schema
        self.num_reads = 0

    def __getitem__(self, key: str) -> Any:
        self.num_reads += key == "type"
        return self._schema[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._schema)

    def __len__(self) -> int:
        return len(self._schema)


def test_a_deep_value_of_a_gemma_call_is_written_once() -> None:
    leaf = Counted({"type": "integer"})
    schema: Mapping[str, Any] = leaf
    for _ in range(8):
        schema = {"type": "object", "properties": {"a": schema}}
    form = ReplyFormat(ROWS["gemma-quotes"], {})
    form.call_grammar((Tool("deep", "", schema),), parallel=False, thinking=False)
    assert leaf.num_reads == 1


def shared_schema(num_referring: int) -> dict[str, Any]:
    """Return a schema of 500 parameters and a long definition, to which some of them refer."""
    properties = {
        f"p{index}": {"$ref": "#/$defs/N"} if index < num_referring else {"type": "integer"}
        for index in range(500)
    }
    definition = {"type": "integer", "description": "d" * 4000}
    return {"type": "object", "properties": properties, "$defs": {"N": definition}}


@pytest.mark.parametrize("name", ["qwen-tags", "dsml"])
def test_definitions_are_written_only_for_the_parameters_that_refer_to_them(name: str) -> None:
    form = ReplyFormat(ROWS[name], {})
    tools = (Tool("many", "", shared_schema(1)),)
    assert form.call_grammar(tools, parallel=False, thinking=False).count("$defs") == 2


@pytest.mark.parametrize("name", ["qwen-tags", "dsml"])
def test_definitions_that_would_exceed_the_limit_of_a_grammar_are_not_written(name: str) -> None:
    form = ReplyFormat(ROWS[name], {})
    tools = (Tool("many", "", shared_schema(500)),)
    with pytest.raises(RequestError, match="the limit is 262144") as raised:
        form.call_grammar(tools, parallel=False, thinking=False)
    assert raised.value.param == "tools"


@pytest.mark.parametrize("spelled", [False, True])
@pytest.mark.parametrize(
    ("value", "is_text"),
    [
        ("x", True),
        ("<b> </parameter\n", True),
        ("x</parameter>", False),
        ("x\n</parameter>zz", False),
        ("</parameter></function>", False),
    ],
)
def test_a_forced_text_in_tags_has_no_tag_that_ends_it_for_the_parser(
    value: str, is_text: bool, spelled: bool
) -> None:
    row = ROWS["qwen-tags"]
    vocabulary = ByteMarks(row, spelled=spelled)
    tool = Tool("f", "", {"properties": {"a": {"type": "string"}}, "required": ["a"]})
    text = ReplyFormat(row, vocabulary.tokens).call_grammar((tool,), parallel=False, thinking=False)
    compiled = GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools")

    def tokens(mark: str) -> list[int]:
        return list(mark.encode()) if spelled else [vocabulary.tokens[mark]]

    call = f"\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n"
    reply = [*tokens("<tool_call>"), *call.encode(), *tokens("</tool_call>"), EOS]
    assert (compiled.matcher().allowed_start(reply) == len(reply)) == is_text


# Parts of texts that a format uses itself, or that look like JSON.
PARTS = (
    *("a", " ", "\n", "<", ">", '"', "{", "[", "\\", "null", "None", "true", "7", ":", ",", "}", "é", "😀"),
    *("</parameter>", "<parameter=", "</function>", "<tool_call>", "</tool_call>", "<think>", "</think>"),
    *(
        "</｜DSML｜parameter>",
        "｜DSML｜",
        "</",
        '<|"|>',
        "<tool_call|>",
        "<|end|>",
        "[ARGS]",
        "<｜tool▁call▁end｜>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
    ),
)
TEXTS = st.lists(st.sampled_from(PARTS), max_size=4).map("".join)
TYPES = st.sampled_from([{"type": "string"}, {"type": ["string", "null"]}, {}])


@pytest.mark.parametrize(
    ("name", "spelled"),
    # A spelled mark of harmony is text of its analysis too, so such a reply hardly ever ends by chance.
    [
        (name, spelled)
        for name in CALLING
        for spelled in (False, True)
        if (name, spelled) != ("harmony", True)
    ],
)
@settings(max_examples=examples(18))
@given(key=st.just("k") | TEXTS, value=TEXTS, types=TYPES)
def test_a_text_of_an_enumeration_is_read_back_or_refused_by_its_tool(
    name: str, spelled: bool, key: str, value: str, types: dict[str, Any]
) -> None:
    row = ROWS[name]
    vocabulary = ByteMarks(row, spelled=spelled)
    schema = {
        "properties": {key: {**types, "enum": [value]}},
        "required": [key],
        "additionalProperties": False,
    }
    tool = Tool("f", "", {"type": "object", **schema})
    refusal = None
    try:
        text = ReplyFormat(row, vocabulary.tokens).call_grammar((tool,), parallel=False, thinking=False)
    except RequestError as error:
        refusal = error
    if refusal is not None:
        assert (refusal.code, refusal.param) == ("unsupported_schema", "tools")
        assert refusal.message.startswith("tool f has ")
        # Only what the format uses itself is refused.
        assert name in {"qwen-tags", "dsml", "gemma-quotes"}
        parts = set(key) & set(":,{}[]") if name == "gemma-quotes" else value.strip() in {"null", "None"}
        assert set(key + value) & set('<>"') or key.strip() != key or parts
        return
    ids = draw(text, vocabulary, ENDS["harmony"] if name == "harmony" else b"", random.Random(0))
    assert ids is not None
    _, said, ((called, arguments),) = read(row, vocabulary, ids, tools=(tool,))
    assert (said.strip(), called, json.loads(arguments)) == ("", "f", {key: value})


@pytest.mark.parametrize(
    ("name", "key", "choices"),
    [
        ("qwen-tags", "k", ["a", "x</parameter>"]),
        ("qwen-tags", "k", ["</tool_call>"]),
        ("qwen-tags", "a>b", ["a"]),
        ("dsml", "k", ["</｜DSML｜parameter>"]),
        ("dsml", 'a"b', ["a"]),
        ("qwen-tags", "k", ["</parameter>", 7]),
        ("gemma-quotes", "a:b", ["a"]),
        ("gemma-quotes", "a ", ["a"]),
        ("gemma-quotes", "k", ['<|"|>']),
        ("gemma-quotes", "k", ["<tool_call|>"]),
    ],
)
def test_a_tool_that_spells_a_tag_of_its_format_is_refused_by_name(
    name: str, key: str, choices: list[Any]
) -> None:
    tool = Tool("f", "", {"properties": {key: {"enum": choices}}})
    with pytest.raises(RequestError, match=r"^tool f has .* cannot write"):
        ReplyFormat(ROWS[name], {}).call_grammar((tool,), parallel=False, thinking=False)


@pytest.mark.parametrize("opened", [False, True])
def test_a_forced_call_of_harmony_opens_its_turn_unless_the_prompt_has(opened: bool) -> None:
    row = ROWS["harmony"]
    vocabulary = ByteMarks(row, spelled=False)
    form = ReplyFormat(row, vocabulary.tokens)
    text = form.call_grammar(TOOLS[1:], parallel=False, thinking=False, opened=opened)
    ids = draw(text, vocabulary, ENDS["harmony"], random.Random(1))
    assert ids is not None
    start = [vocabulary.tokens["<|start|>"], *b"assistant"]
    assert (ids[: len(start)] == start) != opened
    _, said, calls = read(row, vocabulary, ids)
    assert (said, [called for called, _ in calls]) == ("", ["list"])


UNENFORCED: list[tuple[str, dict[str, Any], str]] = [
    *[
        (name, {"properties": {"a": {"type": "string", **limit}}}, keyword)
        for name in ("qwen-tags", "dsml", "gemma-quotes")
        for limit in ({"pattern": "^[0-9]+$"}, {"maxLength": 3}, {"const": "k"})
        for keyword in limit
    ],
    *[(name, {"required": ["z"]}, "required") for name in ("qwen-tags", "dsml", "gemma-quotes")],
    *[(name, {"minProperties": 1}, "minProperties") for name in ("qwen-tags", "dsml", "gemma-quotes")],
    ("qwen-tags", {"properties": {"a": {"type": ["string", "null"], "maxLength": 3}}}, "maxLength"),
    (
        "qwen-tags",
        {"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}}},
        "format",
    ),
    ("gemma-quotes", {"properties": {"a": {"type": "integer", "minimum": 5}}}, "minimum"),
    ("gemma-quotes", {"properties": {"a": {"type": "array", "minItems": 2}}}, "minItems"),
    ("gemma-quotes", {"properties": {"a": {"$ref": "#/$defs/N"}}, "$defs": {"N": {}}}, "$ref"),
    ("gemma-quotes", {"properties": {"a": {"enum": [{"b": 1}]}}}, "enum"),
    ("gemma-quotes", {"properties": {"a": {"type": "object", "required": ["b"]}}}, "required"),
]


@pytest.mark.parametrize(("name", "schema", "keyword"), UNENFORCED)
def test_a_strict_tool_is_refused_for_a_keyword_that_its_format_cannot_enforce(
    name: str, schema: dict[str, Any], keyword: str
) -> None:
    form = ReplyFormat(ROWS[name], {})
    with pytest.raises(RequestError, match=f"enforced in .*: {re.escape(keyword)}$") as raised:
        form.call_grammar((Tool("f", "", schema, True),), parallel=False, thinking=False)
    assert (raised.value.code, raised.value.param) == ("unsupported_schema", "tools")
    form.call_grammar((Tool("f", "", schema),), parallel=False, thinking=False)


@pytest.mark.parametrize("name", CALLING)
def test_a_strict_tool_of_usual_keywords_is_enforced_in_every_format(name: str) -> None:
    properties = {
        **SCHEMA["properties"],  # type: ignore[dict-item]
        "note": {"type": ["string", "null"], "description": "A note."},
        "unit": {"type": ["string", "null"], "enum": ["m", None]},
    }
    schema = {"type": "object", "properties": properties, "additionalProperties": False, "required": ["note"]}
    vocabulary = ByteMarks(ROWS[name], spelled=False)
    form = ReplyFormat(ROWS[name], vocabulary.tokens)
    text = form.call_grammar((Tool("f", "", schema, True),), parallel=False, thinking=False)
    GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools")


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": ["object", "null"], "additionalProperties": False},
        {"anyOf": [{"type": "object", "additionalProperties": False}, {"type": "null"}]},
        {"$ref": "#/$defs/A", "$defs": {"A": {"type": ["object", "string"], "additionalProperties": False}}},
    ],
)
@pytest.mark.parametrize("name", ["hermes", "deepseek"])
def test_the_arguments_of_a_forced_call_are_an_object_also_if_the_schema_allows_others(
    name: str, schema: dict[str, Any]
) -> None:
    row = ROWS[name]
    vocabulary = ByteMarks(row, spelled=False)
    tool = Tool("f", "", schema)
    text = ReplyFormat(row, vocabulary.tokens).call_grammar((tool,), parallel=False, thinking=False)
    drawn = [draw(text, vocabulary, b"", random.Random(seed)) for seed in range(6)]
    whole = [read(row, vocabulary, ids, tools=(tool,)) for ids in drawn if ids is not None]
    assert whole
    for _, _, ((_, arguments),) in whole:
        value = json.loads(arguments)
        assert isinstance(value, dict)
        assert jsonschema.Draft202012Validator(schema).is_valid(value)


ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("name", "thinking"),
    [
        (name, thinking)
        for name in CALLING
        for thinking in (False, True)
        if not ROWS[name].calls_like_json and not (thinking and name == "harmony")
    ],
)
def test_whatever_is_drawn_beside_a_form_has_it_or_is_a_valid_call(name: str, thinking: bool) -> None:
    row, answer = ROWS[name], Grammar("json_schema", json.dumps(ANSWER))
    vocabulary = ByteMarks(row, spelled=False)
    form = ReplyFormat(row, vocabulary.tokens)
    assert form.may_call_beside(answer, thinking=thinking, continues=False)
    text = form.call_or_answer_grammar(TOOLS, answer, parallel=False, thinking=thinking).text
    drawn = [draw(text, vocabulary, ENDS.get(name, b""), random.Random(seed)) for seed in range(6)]
    said = [read(row, vocabulary, ids, thinking=thinking) for ids in drawn if ids is not None]
    for _, shown, calls in said:
        if calls:
            assert not shown.strip()
            assert [called for called, _ in calls] in (["read"], ["list"])
            if calls[0][0] == "read":
                check(json.loads(calls[0][1]))
        else:
            assert jsonschema.Draft202012Validator(ANSWER).is_valid(json.loads(shown))
    assert {bool(calls) for _, _, calls in said} == {False, True}


@pytest.mark.parametrize(
    ("name", "kind", "thinking", "continues"),
    [
        ("llama-json", "json_object", False, False),
        ("think", "json_object", False, False),
        ("hermes", "regex", False, False),
        ("hermes", "json_object", False, True),
        ("harmony", "json_object", True, False),
    ],
)
def test_a_call_has_no_place_where_nothing_tells_it_from_the_text(
    name: str, kind: Any, thinking: bool, continues: bool
) -> None:
    form = ReplyFormat(ROWS[name], {})
    assert not form.may_call_beside(Grammar(kind, "a"), thinking=thinking, continues=continues)
