"""Sealed links between members over TLS, with blocking threads.

`streams` carries bytes, `link` seals and orders frames, and `listen` accepts connections under limits.
"""
