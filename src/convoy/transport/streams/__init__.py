"""Streams of bytes below a link.

`stream` is the Protocol, and `tcp` is TLS 1.3 over TCP with certificates of the roster at both ends.
`testing.streams` has streams inside one process, which cut, stall, reorder and flip bytes on demand. Open
`stream` first.
"""
