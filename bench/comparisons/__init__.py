"""Compare and soak Convoy while it is developed; users run `convoy bench` for the rest.

`fair` and `soak` look at the scheduler and at memory, `fleet` at the coordinator under load and in
simulation, `cuda` at several devices and at rounded weights. `verbs` has the commands of
bench/compare.py, and `local_fleet` runs a whole fleet on this machine.
"""
