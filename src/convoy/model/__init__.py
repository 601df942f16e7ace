"""A stage of a model: its layers, kernels, K/V memory, weights, tokeniser and sampler.

`checkpoints` reads weights, and `loading` builds the layers of a stage from them. `kernels` and `layers`
compute, `kv` holds keys and values, and `parallel` splits layers over ranks. `backends` run a stage on a
host, on CUDA devices or on MLX. `sampling` samples tokens, `constraints` keeps an answer to a grammar, `text`
converts between text and token ids, and `quantize` rounds a checkpoint. `stage` has the members of a stage.
`device` chooses where it runs, and `mlx_device` knows where MLX does. Open `stage` first, then `backends`.
"""
