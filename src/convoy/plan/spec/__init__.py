"""A model's dimensions from its config.json: family, heads, tensors, cache groups and quantisation."""
