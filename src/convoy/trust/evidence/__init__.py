"""Make and verify evidence of members and providers, by a policy, with a verdict.

`policy` reads a verifier's demands, `verify` turns one member's evidence into a `Verdict` with a `level`,
and `provider` does so for a provider with all its members. `evidence` signs a member's claims, and
`activation` enrols a TPM's key. Open `verify` first.
"""
