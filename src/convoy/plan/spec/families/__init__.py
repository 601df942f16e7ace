"""The families that Convoy runs: one module for each, found by `plan.spec.registry`. `plain` has those that
are an embedding, layers and a norm.

A module has `ROWS`, one `Family` for each `model_type` of `config.json`. Beside its row it has what is the
family's own: how its heads are read, and which weights its layers have.
"""
