"""Route each request to a provider, and charge for the answer: the coordinator.

`routing` chooses a provider, `providers` holds their connections, and `requests` follows one request.
"""
