"""A peer: receive a plan, load its stage, take its place in the ring, and run steps.

`Peer` is a peer's life from the head's first message to the next plan. `LoadedPlan` is one plan as the
peer holds it, `PlanClock` knows the newest plan, and `RankPeers` joins a stage that several members hold.
Other modules dial neighbours and fetch weights ahead. The loop of a step is `engine.run`'s `StageWorker`.
Open the module of `Peer` first.
"""
