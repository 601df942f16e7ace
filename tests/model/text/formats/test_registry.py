"""Grammars of answers: the text keeps the caller's form, and a reasoning before it is free."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.constraints.matcher import CompiledGrammar
from convoy.model.text.formats.registry import ReplyFormat
from convoy.model.text.grammar import Grammar
from support.byte_marks import EOS, ByteMarks
from support.replies import ROWS, TOOLS

THINKING = [name for name, row in ROWS.items() if row.parser.think[0]]


def compiled(
    name: str, grammar: Grammar, *, thinking: bool, continues: bool
) -> tuple[ByteMarks, CompiledGrammar]:
    """Return a vocabulary of bytes and marks, and the compiled grammar of an answer in a format."""
    vocabulary = ByteMarks(ROWS[name], spelled=False)
    form = ReplyFormat(ROWS[name], vocabulary.tokens)
    whole = form.answer_grammar(grammar, thinking=thinking, continues=continues)
    return vocabulary, GrammarCompiler(vocabulary).compile(whole, "form")


def takes(grammar: CompiledGrammar, tokens: list[int]) -> bool:
    """Tell whether a grammar takes tokens as a whole answer."""
    whole = [*tokens, EOS]
    return grammar.matcher().allowed_start(whole) == len(whole)


@pytest.mark.parametrize("name", THINKING)
@pytest.mark.parametrize("pattern", ["[ab]+", "^[ab]+$", "a/b|ab", "\n?ab", "a\\/b|[ab]*", "(?:\\\n|a)b"])
def test_a_regular_expression_holds_behind_the_reasoning(name: str, pattern: str) -> None:
    vocabulary, grammar = compiled(name, Grammar("regex", pattern), thinking=True, continues=False)
    end = vocabulary.tokens[ROWS[name].parser.think[1]]
    assert takes(grammar, [*b"Hm: x/y\n", end, *b"\n\nab"])
    assert not takes(grammar, [*b"Hm", end, *b"abc"])
    assert not takes(grammar, [*b"ab"])


@pytest.mark.parametrize("kind", ["lark", "gbnf"])
def test_a_grammar_in_a_language_of_its_own_is_left_as_it_is(kind: str) -> None:
    grammar = Grammar("gbnf" if kind == "gbnf" else "lark", 'start: "a"')
    for row in ROWS.values():
        assert ReplyFormat(row, {}).answer_grammar(grammar, thinking=True, continues=False) is grammar


@pytest.mark.parametrize(("thinking", "continues"), [(False, False), (True, True), (False, True)])
def test_an_answer_of_harmony_keeps_its_form_in_the_final_channel(thinking: bool, continues: bool) -> None:
    vocabulary, grammar = compiled("harmony", Grammar("json_object"), thinking=thinking, continues=continues)
    of = vocabulary.tokens
    final = [of["<|channel|>"], *b"final", of["<|message|>"], *b'{"a": 1}']
    thought = [*b"Hm.", of["<|end|>"], of["<|start|>"], *b"assistant", *final]
    analysis = [of["<|channel|>"], *b"analysis", of["<|message|>"], *thought]
    answers = {"text": [*b'{"a": 1}'], "final": final, "thought": thought, "analysis": analysis}
    expected = {"thought"} if thinking else {"text"} if continues else {"final", "analysis"}
    assert {name for name, tokens in answers.items() if takes(grammar, tokens)} == expected


def test_no_prompt_of_harmony_ends_in_a_reasoning() -> None:
    assert not ReplyFormat(ROWS["harmony"], {}).begins_in_reasoning([1, 2], lambda _: "text")


OWN = {"form": Grammar("json_object"), "pattern": Grammar("regex", r"\n?[ab]+")}
ANSWERS = {"form": b'{"a": 1}', "pattern": b"\nab"}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("name", THINKING)
def test_a_reasoning_that_the_model_opens_itself_is_free_until_it_ends(name: str, kind: str) -> None:
    vocabulary = ByteMarks(ROWS[name], spelled=False)
    form = ReplyFormat(ROWS[name], vocabulary.tokens)
    opening, closing = (vocabulary.tokens[mark] for mark in ROWS[name].parser.think)
    text = list(ANSWERS[kind])

    def grammar(*, may_think: bool, continues: bool = False) -> CompiledGrammar:
        whole = form.answer_grammar(OWN[kind], thinking=False, continues=continues, may_think=may_think)
        return GrammarCompiler(vocabulary).compile(whole, "form")

    own = grammar(may_think=True)
    assert takes(own, text)
    assert takes(own, [opening, *b"Hm: {x\n", closing, *b"\n\n", *text])
    assert not takes(own, [opening, *b"Hm", closing, *b"~"])
    assert not takes(own, [*b"Hm", closing, *text])
    assert not takes(own, [*b"\n\n\n", *text])
    for other in (grammar(may_think=False), grammar(may_think=True, continues=True)):
        assert takes(other, text)
        assert not takes(other, [opening, *b"Hm", closing, *text])


@pytest.mark.parametrize("name", [name for name in THINKING if ROWS[name].grammar])
def test_a_forced_call_may_come_behind_a_reasoning_that_the_model_opens_itself(name: str) -> None:
    vocabulary = ByteMarks(ROWS[name], spelled=False)
    form = ReplyFormat(ROWS[name], vocabulary.tokens)
    opening, closing = (vocabulary.tokens[mark] for mark in ROWS[name].parser.think)
    for may_think, continues in ((True, False), (False, False), (True, True)):
        text = form.call_grammar(
            TOOLS[1:], parallel=False, thinking=False, may_think=may_think, continues=continues
        )
        matcher = GrammarCompiler(vocabulary).compile(Grammar("lark", text), "tools").matcher()
        thought = [opening, *b"Hm", closing]
        assert matcher.allowed_start(thought) == (len(thought) if may_think and not continues else 0)
        assert not matcher.allowed_start([*b"~"])


@pytest.mark.parametrize("name", THINKING)
def test_a_reply_may_open_a_reasoning_unless_the_prompt_has_one_that_is_open_or_just_ended(name: str) -> None:
    opening, closing = ROWS[name].parser.think
    form = ReplyFormat(ROWS[name], {opening: 1, closing: 2})
    spelled = ReplyFormat(ROWS[name], {})
    texts = {1: "", 2: "", 3: "\n", 4: "text"}

    def text_of(ids: Sequence[int]) -> str:
        return "".join(texts[number] for number in ids)

    prompts = {
        (4,): True,
        (1, 4): True,
        (4, 1): False,
        (4, 1, 3): False,
        (4, 1, 3, 2): False,
        (1, 2, 3): False,
    }
    assert {ids: form.may_open_reasoning(ids, text_of) for ids in prompts} == prompts
    assert not any(spelled.may_open_reasoning(ids, text_of) for ids in prompts)
