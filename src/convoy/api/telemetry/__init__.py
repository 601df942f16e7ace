"""Serve the HTTP server's metrics, and send traces to a collector.

`metrics` answers GET /metrics, and `http_counts` counts requests by path and status. `otlp` sends spans by
OTLP over HTTP and alone imports OpenTelemetry. The interface that all others use is `api.traces`. Open
`metrics` first for figures, or `otlp` for spans.
"""
