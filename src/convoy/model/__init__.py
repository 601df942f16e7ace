"""A stage of a model: its layers, kernels, K/V memory, weights, tokeniser and sampler.

`checkpoints` reads weights, `kernels` and `layers` compute, `kv` holds keys and values, `parallel` splits
layers over ranks, `loading` builds the layers of a stage, `backends` run them on a host or on CUDA devices,
`sampling` draws tokens, and `text` converts between text and token ids.
"""
