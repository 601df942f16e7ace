"""Constrain an answer to a grammar: a JSON schema, a regular expression, choices or rules.

`compiler` compiles a `text.grammar.Grammar` off the engine's thread, within bounds of time and memory, and
caches the result. `matcher` follows one answer token by token and tells which tokens may come next. The
grammars are llguidance's (github.com/guidance-ai/llguidance). Open `matcher` first.
"""
