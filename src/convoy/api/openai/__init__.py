"""Serve OpenAI's chat completions, completions and embeddings, and vLLM's /tokenize and /detokenize.

`bodies` decodes a request, `conversation` reads its messages and `answer_form` the demanded form of the
answer. `parsed_request` makes engine requests of them, which `api.chat` submits. `chat_answer` and
`completion_answer` build the two kinds of answer from the forms in `answers`, with `usage` for counts of
tokens and `token_text` for log-probabilities. `embeddings` and `tokenize` have their endpoints whole. Open
`parsed_request` first.
"""
