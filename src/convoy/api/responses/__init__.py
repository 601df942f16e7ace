"""Serve OpenAI's Responses API over the same generation as chat completions.

`translate` turns a body (`bodies`) into a chat request, with `items` for the history and `tools` for the
functions. `answer` turns the reply into events or one body: `output` writes the items, and `shapes` has all
forms. `store` keeps responses in memory, and `endpoint` has the paths. Open `translate` first.
"""
