"""The OpenAI-compatible HTTP server: `run_server(service, options)`."""
