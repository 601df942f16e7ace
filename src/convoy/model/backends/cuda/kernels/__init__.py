"""Triton kernels and the modules that launch them, with a plain reference in torch."""
