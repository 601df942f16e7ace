"""Exchange evidence between head and peers, and verify it against the head's policy.

`EvidenceMaker` makes claims about this process and, with a TPM, a quote of this machine. `Attestation`
sends challenges and evidence over links, `MemberVerifier` decides which members may have a stage, and
`EvidenceRelay` collects peers' evidence for a coordinator. The rules of a verdict are in `trust.evidence`.
Open the exchange first.
"""
