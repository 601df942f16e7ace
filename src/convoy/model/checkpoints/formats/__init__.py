"""Quantised formats: GGUF, GPTQ, AWQ, MLX, MXFP4, FP8 and compressed-tensors, and how each is unpacked."""
