"""List the formats, with one row each, and find a model's format by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from convoy.model.text.formats import hermes
from convoy.model.text.formats.grammar import CallRules
from convoy.model.text.formats.lexer import Lexer
from convoy.model.text.formats.parser import THINK, ReplyParser


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
    # Model types whose checkpoints ship no template that shows the format.
    model_types: frozenset[str] = frozenset()
    # The template joins the arguments of a call as text.
    arguments_as_text: bool = False
    # The length of call ids that the template demands.
    call_id_chars: int | None = None


# More tokens than the mark that opens a reasoning has, when it is spelled.
_END_TOKENS = 24

_PLAIN = FormatRow("think", ("<think>",), THINK, ReplyParser, None)
# The first row that fits counts, so the special ones come first.
FORMATS: tuple[FormatRow, ...] = (
    FormatRow("hermes", ("<tool_call>",), hermes.MARKS, hermes.HermesParser, hermes.write_grammar),
    _PLAIN,
)


def find_format(template: str, model_type: str) -> FormatRow:
    """Return the row of the format that a chat template writes, or else that of plain text."""
    for row in FORMATS:
        if model_type in row.model_types or any(text in template for text in row.in_template):
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

    def lexer(self, shown_of: Callable[[int], str]) -> Lexer:
        """Return a lexer for one choice; ``shown_of`` returns the text of one token."""
        return Lexer(self.row.marks, self.tokens, shown_of)

    def begins_in_reasoning(self, prompt_ids: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> bool:
        """Tell whether a prompt ends behind a mark that opens a reasoning, but for white space.

        ``text_of`` returns the text of token ids.
        """
        opening = self.row.parser.think[0]
        number = self.tokens.get(opening)
        end = list(prompt_ids[-_END_TOKENS:])
        if number is None:
            return text_of(end).rstrip().endswith(opening)
        while end and end[-1] != number and not text_of(end[-1:]).strip():
            end.pop()
        return end[-1:] == [number]
