"""Choose which member owns which layers, under a policy, or say why none can."""
