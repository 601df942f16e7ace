"""Be a provider: dial a coordinator, prove oneself, and answer with the engine behind.

`run` takes a provider from its first measurement to its last answer. `first_look` names a head in the
coordinator's place, `provide` keeps the connection, and `greeting` verifies the coordinator. `provided`
answers one request, `allowed` rebuilds its body from a list of fields, and `upstream` asks the engine.
`evidence` shows what the provider proves. Open `provide` first.
"""
