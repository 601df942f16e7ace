"""Measure ranks that share every layer.

`all_reduce` times the sums of two ranks by size and transport, and `rank` is one of these ranks as a
process. `tp` compares two ranks with one member and with a pipeline of two. Open `all_reduce` first.
"""
