"""Formats in which models write reasoning and tool calls: one module for each, one row in `registry`.

A `ReplyFormat` has the control tokens of a format (its marks), its parser and its grammar of forced calls.
`Lexer` separates marks from text: a mark that is a token counts as such only by its id, so that no spelled
text opens a call. A `ReplyParser` turns marks and text into pieces. Open `registry`, then `parser`.
"""
