"""Yield metric families of members and engines, and serve them where there is no HTTP server.

`families` builds the families that Prometheus reads; nothing here counts. One module has an engine's
families, under vLLM's names where the meaning is equal, and one a member's. `ScrapeListener` is a small
bounded HTTP listener. Open `families` first.
"""
