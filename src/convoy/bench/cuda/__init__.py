"""Measure CUDA devices, without a server.

`single` measures one stage on one device, `pair` a pipeline of two devices, `ranks` two devices that share
every layer, and `rounded` weights of 8 and 4 bits. `device_ring` runs the steps of all of them. Open
`single` first.
"""
