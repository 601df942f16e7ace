"""Serve a fleet of providers behind a coordinator. `coordinator`, `provider` and `proxy` are programs.

They share only the modules beside this file and the paths in `apis`, and they meet over sockets. The `books`
are the coordinator's database; the others use its prices alone. `consumer_request` reads a body as far as
routing must know it, `lease` holds the messages between proxy and coordinator, `status` describes a
coordinator to its readers, and `provider_verifier` checks a provider's evidence. Open `coordinator` first.
"""
