"""Run heads and peers as members: they join, share a model out, run it, and recover from losses.

`head` and `peer` are the two roles, `presence` the connected members, `recovery` the plan after a loss,
`weights` the distribution of weights, `enrolment` and `attestation` the proof of identity and of state,
`checkup` the findings of `convoy doctor`, `status` the picture of all members, and `metrics` the figures for
Prometheus. `RunningCluster` is a
head with its engine, for servers, commands and tests. Open its module first, then `head` and `peer`.
"""
