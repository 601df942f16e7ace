"""Metrics of the HTTP server, and the export of traces over OTLP."""
