"""Linears over matrices that keep the form of the model's file, with the bits of the unpacked float32 matrix.

`StoredMatrix` of `matrix` holds codes and scales of a matrix and unpacks them as the format's reader does.
`StoredLinear` of `linear` multiplies by it without unpacking all of it. `weights` cuts and joins weights that
are tensors or stored matrices, and `bits` takes small whole numbers out of words. `integers` defines products
with rows rounded to 8 bits, and `int8` has their compiled form. Open `matrix` first.
"""
