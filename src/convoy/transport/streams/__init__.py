"""Streams of bytes: TLS 1.3 over TCP, or memory inside one process."""
