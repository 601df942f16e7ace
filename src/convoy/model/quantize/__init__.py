"""Round a model's weights to 4 or 8 bits: ``convoy quantize`` and ``--quantize``.

`search` finds the codes and scales of a matrix, and `parts` decides which matrices are rounded. `checkpoint`
writes a folder through `shards`, and `load` rounds as a stage loads its layers. `record` is the folder's own
account of its error, which a parity certificate shows. Open `parts` first.
"""
