"""Sessions: a client's timeline of tokens and K/V, saved to a file and restored on other members.

`Session` extends, rewinds and forks a timeline. `SessionBlocks` moves its K/V between a file and the
stages, a slice at a time between steps. The format is a safetensors file, which may be sealed and is
written whole or not at all. Open the module of `Session` first.
"""
