"""Hold the coordinator's end of each provider.

`connection` runs one provider's WebSocket: its identity, its offers and its answers in flight. `approvals`
remembers providers that wait for approval, and `record` those that went or were refused. `proof` proves the
coordinator to a provider, and `answering` queues one answer within its reader's window. Open `connection`
first.
"""
