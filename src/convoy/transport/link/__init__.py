"""A link: handshake, sealed frames in both directions, liveness and replacement of connections."""
