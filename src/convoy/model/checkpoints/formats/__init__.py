"""Quantised formats, and how their stored tensors make the tensors of a model.

GGUF, GPTQ and AWQ, MLX, MXFP4, FP8 and compressed-tensors have a module each. `Unpacking` is their common
form: which stored tensors it reads and which tensor it returns. Codes and scales stay as they are stored
where a kernel can use them. Open the module of `Unpacking` first.
"""
