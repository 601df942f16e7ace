"""Triton kernels and the modules that launch them."""
