"""A stage on CUDA devices: bfloat16 layers, captured decodes and paged K/V pools."""
