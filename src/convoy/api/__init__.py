"""The HTTP server: OpenAI's endpoints over an engine, with TLS, keys and limits.

Sub-packages, each of which may import those before it: `listen` accepts connections and bounds them,
`keys` checks API keys and their limits, `body` reads and bounds a request's body, `telemetry` serves metrics
and traces, and `openai` parses requests and builds responses.
"""
