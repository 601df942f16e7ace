"""Sealed links between members over TLS, with blocking threads.

`streams` carries bytes, `link` seals and orders frames, and `listen` accepts connections under limits. Beside
them, `dial` opens a link, `membership` holds the roster that counts now and the links under it, `member` is
this process as a member, and `network` gives real sockets or an in-memory network. `admission` decides which
connections may begin a handshake. Open `network` first, then `link`.
"""
