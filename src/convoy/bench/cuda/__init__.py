"""Measure CUDA devices: one device, a pair in a pipeline, two ranks, and rounded weights."""
