"""The head: plan over the connected members, bring the plan up, and run the engine over it.

`Head` holds the connected peers, its own stage and the running plan. `Planner` chooses a plan for the
members at hand, a bring-up runs the first plan or the next best, and `Standbys` hold stages for a later
loss. Other modules predict step times, fetch weights ahead, and show the cluster. Open the module of
`Head` first, then that of `Planner`.
"""
