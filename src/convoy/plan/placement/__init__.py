"""Choose which member owns which layers, under a policy, or give the reason why none can."""
