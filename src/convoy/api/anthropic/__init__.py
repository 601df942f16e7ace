"""Serve Anthropic's endpoints: /v1/messages, its count_tokens, and the models in its form.

`bodies` decodes a request, `history` and `tools` turn it into a conversation, and `translate` into an engine
request, which `api.chat` submits. `answer` builds events and bodies from the forms in `shapes`, `problem`
those of errors, and `models` lists the models. Open `translate` first.
"""
