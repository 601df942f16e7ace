"""A stage that several ranks hold: the leader orders steps, and the followers run them.

`LeaderStage` and `FollowerLoop` are ranks on different members; `RankStages` and `DeviceRankStages` are
ranks of one host as threads or CUDA devices. To the rest of the engine each is a stage like any other.
`sums` holds the collectives between them. Open the module of `LeaderStage` first.
"""
