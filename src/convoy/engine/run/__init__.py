"""Execute steps: the head's side over one stage or a pipeline, and the loop of a peer.

`Executor` is the Protocol: `submit` starts a step, `collect` returns the oldest. `LocalExecutor` runs the
whole model in this process, `PipelineExecutor` runs it over members, and `StageWorker` is the loop of a
peer. Other modules hold deadlines, sampling at a peer, and K/V transfers of sessions. Open the Protocol's
module first.
"""
