"""The memory of a stage for weights, K/V blocks and a step, and the check that its member has as much."""
