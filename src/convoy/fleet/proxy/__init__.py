"""Seal a user's requests, on the user's machine, to providers that the user trusts: the local proxy.

`server` listens for the user's tools, `proxy` takes each request from its lease to its answer, and
`client` talks to the coordinator. `trust` decides to which providers a request may be sealed, and `answer`
opens the sealed answer. Open `proxy` first, then `trust`.
"""
