"""Measure stages on one CUDA device and on several, and linears of rounded weights, without a server.

`single` measures one stage on one device, `pair` a pipeline of two devices, `ranks` two devices that share
every layer, and `rounded` weights of 8 and 4 bits. Open `single` first.
"""
