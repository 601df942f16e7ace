"""The coordinator: routes each request to a provider, and charges for the answer.

`routing` chooses a provider, `providers` holds their connections, and `requests` follows one request.
"""
