"""Backends: run a stage on this host or on CUDA devices."""
