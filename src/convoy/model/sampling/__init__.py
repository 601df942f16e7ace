"""Sample tokens, at the head or at another owner of the output.

`params` are a request's parameters. The sampler is counter-based: the same logits, parameters,
choice and position always give the same token. `output_rows` hold the work of one step: sample, score, or
return log-probabilities. Open `params` first.
"""
