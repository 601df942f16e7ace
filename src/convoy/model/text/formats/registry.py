"""List the formats, with one row each, and find a model's format by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from convoy.model.text.conversation import Tool
from convoy.model.text.formats import deepseek, gemma, harmony, hermes, llama, mistral, tags
from convoy.model.text.formats.grammar import CallRules
from convoy.model.text.formats.lexer import Lexer
from convoy.model.text.formats.parser import THINK, ReplyParser
from convoy.model.text.grammar import Grammar


@dataclass(frozen=True, slots=True)
class FormatRow:
    """Describe one format."""

    name: str
    # A template with one of these texts writes the format.
    in_template: tuple[str, ...]
    marks: tuple[str, ...]
    parser: type[ReplyParser]
    # None: the format has no calls.
    grammar: Callable[[CallRules], str] | None
    # Writes the start of an answer's grammar up to its text, and its rules; None: nothing comes before it.
    prelude: Callable[[CallRules, bool], tuple[str, list[str]]] | None = None
    # The template joins the arguments of a call as text.
    arguments_as_text: bool = False
    # The length of call ids that the template demands.
    call_id_chars: int | None = None
    # A call begins as a JSON text does.
    calls_like_json: bool = False


# More tokens than the mark that opens a reasoning has, when it is spelled.
_END_TOKENS = 24

_PLAIN = FormatRow("think", ("<think>",), THINK, ReplyParser, None)
# The first row that fits counts, so the special ones come first.
FORMATS: tuple[FormatRow, ...] = (
    FormatRow(
        "harmony",
        ("<|channel|>",),
        harmony.MARKS,
        harmony.HarmonyParser,
        harmony.write_grammar,
        harmony.write_prelude,
    ),
    FormatRow(
        "gemma-quotes", ("<|tool_call>", "<|channel>"), gemma.MARKS, gemma.GemmaParser, gemma.write_grammar
    ),
    FormatRow(
        "dsml",
        (tags.DSML,),
        tags.DSML_MARKS,
        tags.DsmlParser,
        tags.write_dsml_grammar,
    ),
    FormatRow(
        "deepseek",
        (deepseek.BEGIN,),
        deepseek.MARKS,
        deepseek.DeepSeekParser,
        deepseek.write_grammar,
        arguments_as_text=True,
    ),
    FormatRow(
        "mistral-args",
        (mistral.CALLS,),
        mistral.MARKS,
        mistral.MistralParser,
        mistral.write_grammar,
        call_id_chars=9,
    ),
    FormatRow(
        "llama-json",
        (llama.TAG, "ipython"),
        llama.MARKS,
        llama.LlamaParser,
        llama.write_grammar,
        calls_like_json=True,
    ),
    FormatRow("qwen-tags", ("<function=",), tags.QWEN_MARKS, tags.QwenTagParser, tags.write_qwen_grammar),
    FormatRow("hermes", ("<tool_call>",), hermes.MARKS, hermes.HermesParser, hermes.write_grammar),
    _PLAIN,
)


def find_format(template: str) -> FormatRow:
    """Return the row of the format that a chat template writes, or else that of plain text."""
    for row in FORMATS:
        if any(text in template for text in row.in_template):
            return row
    return _PLAIN


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """Hold the format of one model: its row, and the ids of those marks that are tokens."""

    row: FormatRow
    tokens: Mapping[str, int]

    @property
    def has_calls(self) -> bool:
        """Tell whether the model can write calls."""
        return self.row.grammar is not None

    def call_grammar(
        self,
        tools: tuple[Tool, ...],
        *,
        parallel: bool,
        thinking: bool,
        continues: bool = False,
        may_think: bool = False,
        opened: bool = True,
    ) -> str:
        """Return the Lark grammar of a reply that calls ``tools``, behind its reasoning if there is one.

        ``thinking`` and ``may_think`` tell where the prompt ends; see `may_open_reasoning` for the second.
        ``continues`` tells that the prompt ends inside the text, and ``opened`` that it has opened the turn.
        """
        assert self.row.grammar is not None, "only a format with calls can force them"
        return self.row.grammar(self._rules(tools, parallel, thinking, may_think and not continues, opened))

    def answer_grammar(
        self,
        grammar: Grammar,
        *,
        thinking: bool,
        continues: bool,
        may_think: bool = False,
        opened: bool = True,
    ) -> Grammar:
        """Return the grammar of a reply whose text keeps ``grammar``, behind its reasoning if there is one.

        ``continues`` tells that the prompt ends inside the text, and ``opened`` that it has opened the turn.
        A grammar in a language of its own holds from the beginning and is returned itself: such a reply has
        no reasoning.
        """
        rules = self._rules((), False, thinking, may_think and not continues, opened)
        if self.row.prelude is not None and (thinking or not continues):
            prelude, extra = self.row.prelude(rules, thinking)
            return rules.answer(grammar, prelude=prelude, extra=extra)
        return rules.answer(grammar) if rules.reasoning_end else grammar

    def may_call_beside(self, grammar: Grammar, *, thinking: bool, continues: bool) -> bool:
        """Tell whether a reply may call tools in place of a text that keeps ``grammar``.

        The first letter tells a JSON text from a call, but for one format. A prompt that ends inside the text
        or inside a channel leaves no place for a call.
        """
        in_channel = self.row.prelude is not None and thinking
        is_told = grammar.kind in {"json_object", "json_schema"} and not self.row.calls_like_json
        return self.has_calls and is_told and not continues and not in_channel

    def call_or_answer_grammar(
        self,
        tools: tuple[Tool, ...],
        grammar: Grammar,
        *,
        parallel: bool,
        thinking: bool,
        may_think: bool = False,
        opened: bool = True,
    ) -> Grammar:
        """Return the grammar of a reply that calls ``tools``, or that is a text that keeps ``grammar``.

        The prompt ends as that of `call_grammar`. No tool is strict here.
        """
        assert self.row.grammar is not None, "only a format with calls can force them"
        lenient = tuple(replace(tool, strict=False) for tool in tools)
        rules = replace(self._rules(lenient, parallel, thinking, may_think, opened), form=grammar)
        return replace(grammar, kind="lark", text=self.row.grammar(rules))

    def _rules(
        self, tools: tuple[Tool, ...], parallel: bool, thinking: bool, may_think: bool, opened: bool
    ) -> CallRules:
        opening, closing = self.row.parser.think
        return CallRules(
            tools,
            parallel,
            closing if thinking or may_think else "",
            self.tokens,
            opening if may_think and not thinking else "",
            opened,
        )

    def lexer(self, shown_of: Callable[[int], str]) -> Lexer:
        """Return a lexer for one choice; ``shown_of`` returns the text of one token."""
        return Lexer(self.row.marks, self.tokens, shown_of)

    def begins_in_reasoning(self, prompt_ids: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> bool:
        """Tell whether a prompt ends behind a mark that opens a reasoning, but for white space.

        ``text_of`` returns the text of token ids.
        """
        return self._ends_behind(self.row.parser.think[0], prompt_ids, text_of)

    def may_open_reasoning(self, prompt_ids: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> bool:
        """Tell whether a reply may begin with the mark that opens a reasoning.

        The model has tokens for the marks then, and the prompt has no reasoning that is open or just ended.
        """
        opening, closing = self.row.parser.think
        return (
            {opening, closing} <= self.tokens.keys()
            and not self._ends_behind(opening, prompt_ids, text_of)
            and not self._ends_behind(closing, prompt_ids, text_of)
        )

    def _ends_behind(
        self, mark: str, prompt_ids: Sequence[int], text_of: Callable[[Sequence[int]], str]
    ) -> bool:
        if not mark:
            return False
        number = self.tokens.get(mark)
        end = list(prompt_ids[-_END_TOKENS:])
        if number is None:
            return text_of(end).rstrip().endswith(mark)
        while end and end[-1] != number and not text_of(end[-1:]).strip():
            end.pop()
        return end[-1:] == [number]
