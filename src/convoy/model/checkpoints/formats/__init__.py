"""Quantised formats, and how their stored tensors make the tensors of a model.

GGUF (`gguf`), MLX, MXFP4, NVFP4, FP8, bitsandbytes and compressed-tensors have a module each, and GPTQ and
AWQ share one (`columns`). `Unpacking` is their common form: which stored tensors it reads and which tensor it
returns. Codes and scales stay as they are stored where a kernel can use them. Open the module of `Unpacking`
first.
"""
