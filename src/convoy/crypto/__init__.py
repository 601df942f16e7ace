"""Keys, certificates, the handshake, and sealing. All functions take and return bytes and open no sockets.

`handshake` is the inner handshake of a link, over the key schedule in `keys` and the claims in `claims`.
`seal` seals and opens frames with the ciphers of `cipher`. `identity` holds a member's keys, `certificate`
its TLS certificate, and `keyfile` and `key_envelope` keep keys on disk. `enrolment` computes an
invitation's proofs. `tpm` parses TPM 2.0 structures, and `sealed` holds blind mode and sealed files. Open
`handshake` first, then `seal`.
"""
