"""Keys, certificates, the handshake, and sealing. The functions take and return bytes, and open no
sockets.

`tpm` parses TPM 2.0 structures, and `sealed` holds blind mode and sealed files.
"""
