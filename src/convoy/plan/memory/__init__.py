"""How much memory a stage takes for weights, K/V blocks and a step, and whether a member has it."""
