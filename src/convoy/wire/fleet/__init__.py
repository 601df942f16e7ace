"""Messages between providers, coordinators and proxies, certificates and sealed records.

`messages` is the closed set that passes between a provider and its coordinator. `records` carries a sealed
answer to a proxy, `certified` is an operator's certificate for a provider, and `provider_evidence` the
evidence of a provider with its members. Open `messages` first.
"""
