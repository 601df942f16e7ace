"""Sample tokens, at the head or at another owner of the output.

`params` are a request's parameters. The sampler is counter-based: the same logits, parameters,
choice and position always give the same token. `sample` is its definition for one row. `output_rows` hold
the work of one step: sample, score, or return log-probabilities. `host_rows` draws several rows at once, and
`rows` lays a step's jobs out as arrays for a device. Open `params` first.
"""
