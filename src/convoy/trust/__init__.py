"""Sign and check facts: rosters, evidence and policies, invitations, signed models and audit logs.

No sockets. `roster` is the signed list of members, and `evidence` turns claims and a policy into a
verdict. `invite` encodes an invitation, and `consumption` records that it was used once. `audit` keeps a
signed chain of a key's acts, and `signed_model` signs the digest of a model. Open `roster` first.
"""
