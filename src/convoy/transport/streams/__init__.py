"""Streams of bytes below a link.

`stream` is the Protocol, `tcp` is TLS 1.3 over TCP with certificates of the roster at both ends, and
`memory` stays inside one process and can cut, stall, reorder and flip bytes on demand. Open `stream`
first.
"""
