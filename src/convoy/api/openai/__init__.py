"""Serve OpenAI's endpoints /v1/chat/completions and /v1/completions, and vLLM's /tokenize and /detokenize.

`bodies` decodes a request and `parsed_request` turns it into engine requests, which `api.chat` submits.
`chat_answer` and `completion_answer` build the two kinds of answer from the forms in `answers`. `usage`
writes counts of tokens and `token_text` shows log-probabilities. `tokenize` shows a
prompt's tokens without running it. Open `parsed_request` first.
"""
