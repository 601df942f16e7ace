"""Text of a model: tokeniser, chat templates in a child process, stop strings and control tokens.

`Tokenizer` converts text and ids, over a `Vocabulary` in which only our own callers can write control tokens.
`ChatTemplate` encodes messages, and its template runs in a process with bounded time and memory. `StopFilter`
finds stop strings across tokens. `conversation` holds messages and tools, `grammar` describes the texts that
an answer may have, and `formats` read and write the calls of each model. Open `tokens` first.
"""
