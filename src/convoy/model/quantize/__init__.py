"""Write a checkpoint with 4-bit or 8-bit weights: ``convoy quantize``.

`search` finds the codes and scales of a matrix. `checkpoint` decides what is rounded, and writes the folder
through `shards`. `record` is the folder's own account of its error, which a parity certificate shows. Open
`checkpoint` first.
"""
