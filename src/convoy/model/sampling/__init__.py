"""Define sampling: a request's parameters, the sampler, and the jobs of the output's owner."""
