"""Execute steps: the `Executor` over one stage or over a pipeline, and the loop of a peer."""
