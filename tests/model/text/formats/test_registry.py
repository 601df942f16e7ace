"""Grammars of answers: the text keeps the caller's form, and a reasoning before it is free."""

from __future__ import annotations

import pytest

from convoy.model.constraints.compiler import GrammarCompiler
from convoy.model.constraints.matcher import CompiledGrammar
from convoy.model.text.formats.registry import ReplyFormat
from convoy.model.text.grammar import Grammar
from support.byte_marks import EOS, ByteMarks
from support.replies import ROWS

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
