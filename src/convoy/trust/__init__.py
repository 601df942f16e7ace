"""Sign and check facts: rosters, evidence and policies, invitations, signed models and audit logs.

No sockets.
"""
