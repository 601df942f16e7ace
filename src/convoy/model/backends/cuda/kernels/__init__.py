"""Triton kernels and the modules that launch them, with a plain reference in torch.

One module for each kind of work: paged attention, the product of a lone row, of a few rows and of many,
rounded weights, the pointwise steps between products, rotary positions, sums over ranks, and the drawing of
tokens. Triton itself is imported in one place. Open the reference first: tests compare every kernel with it.
"""
