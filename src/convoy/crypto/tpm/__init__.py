"""Parse TPM 2.0 structures strictly, and compute with them.

`structures` parses public areas, quotes and signatures, `endorsement` checks a manufacturer's certificate,
and `credential` makes a secret that only one TPM can open. The process that talks to a TPM is in
`cluster.attestation`. Open `structures` first.
"""
