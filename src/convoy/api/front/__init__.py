"""Serve HTTP in a process of its own beside the engine's, over an inherited socket pair.

In the engine's process, `supervisor` starts the front process, starts it again after a crash, and drains it;
`host` runs its requests on the engine. In the front process, `child` is its life, and `remote` stands for
the engine. Between them, `channel` sends frames, `convert` turns requests, outputs and errors into messages
of `wire.front` and back, and `setup` has the server's options.
"""
