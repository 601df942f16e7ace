"""Serve an engine over HTTP: the endpoints of OpenAI, Anthropic and Ollama, with TLS, keys and limits.

Sub-packages, each of which may import those before it: `listen` accepts connections and bounds them, `keys`
checks API keys and their limits, `body` reads and bounds a request's body, `telemetry` serves metrics and
traces, `chat` runs requests for every API, and `openai`, `anthropic`, `responses` and `ollama` have the forms
of one API each. `page` has the page of the head, and its sessions. `front` runs all of it in a process of its
own beside the engine's. Beside them, `guard` admits or refuses a
request, `engine_stream` joins the engine's thread to the event loop, `refusals` are the errors of HTTP alone,
and `problem` turns errors into HTTP status and body. Open `app` first: it is the table of paths.
"""
