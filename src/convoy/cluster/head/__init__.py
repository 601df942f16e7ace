"""The head: plan over the connected members, bring the plan up, and run the engine over it."""
