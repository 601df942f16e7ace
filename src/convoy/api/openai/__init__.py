"""Serve OpenAI's endpoints /v1/chat/completions and /v1/completions.

`bodies` decodes a request, `parsed_request` turns it into engine requests, and `generate` submits these
and writes the answer. `chat_answer` and `completion_answer` build the two kinds of answer from the forms
in `answers`. `usage` counts tokens and `token_text` shows log-probabilities. Open `generate` first.
"""
