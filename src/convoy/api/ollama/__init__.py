"""Serve Ollama's endpoints: /api/chat, /api/generate, /api/tags, /api/show and /api/version.

`translate` turns a body into OpenAI's form of a chat, which `api.openai` reads and `api.chat` submits.
`answer` builds the lines or the body of an answer, and `models` describes the models. Open `translate` first.
"""
