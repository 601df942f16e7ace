"""Accept HTTP connections within limits that hold before a client is known.

`acceptor` gives each connection a place, `http_protocol` bounds the bytes of its head, and `keep_place`
keeps the place of an admitted request. `origins` checks Host and Origin, `paths` normalises paths, and
`tls` loads the certificate. `options` holds all options of the server and `http_limits` those of its
connections. Open `acceptor` first.
"""
