"""Start servers and members: the model to run, invitations, providers, coordinators, and a running head's
API.
"""
