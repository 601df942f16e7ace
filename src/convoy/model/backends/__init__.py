"""Backends: each runs a stage on one kind of hardware, in a package of its own.

`host` runs it on this machine's CPU, `cuda` on CUDA devices, `mlx` on Apple's GPU. The rest of the program
sees the same stage from all: load, run a batch, read and write K/V, sample. A backend is imported only where
a device asks for it. Open the stage's module in `host` first: it is the reference.
"""
