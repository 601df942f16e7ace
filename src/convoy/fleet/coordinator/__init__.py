"""Route each request to a provider, and charge for the answer: the coordinator.

`routing` chooses a provider, `providers` holds their connections, and `requests` follows one request.
`server` listens, `coordinator` joins the parts, `callers` checks API keys, and `bounds` limits the tokens
that a provider may bill. `about` answers questions, those of the page among them, from a `picture` that all
readers share. `admin` serves administrators on a listener of its own. Open `coordinator` first.
"""
