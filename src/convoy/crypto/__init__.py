"""Keys, certificates, the handshake, and sealing. Bytes in, bytes out: no sockets.

`tpm` parses TPM 2.0 structures, and `sealed` holds blind mode and sealed files.
"""
