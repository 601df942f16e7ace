"""Sampling: parameters of a request, the sampler, and the rows that the output's owner draws from."""
