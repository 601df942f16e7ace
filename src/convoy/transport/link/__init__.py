"""A link: handshake, sealed frames in both directions, liveness and replacement of connections.

`establish` runs the inner handshake over two streams and makes a `Link`. `outgoing` queues, seals and
sends frames; `incoming` opens them, `reader` delivers them, and `inbox` keeps them for their owner.
`pings` proves life, and `replacement` moves a standing link to fresh connections. Open `link` first, then
`outgoing`.
"""
