"""Measure CUDA devices, without a server.

`single` measures one stage on one device, and `device_ring` runs its steps. Comparisons of several devices
and of rounded weights are no part of the package: they lie in bench/comparisons/cuda/. Open `single` first.
"""
