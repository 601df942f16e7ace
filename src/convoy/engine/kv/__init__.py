"""Account for K/V blocks at the head: integers, no tensors.

`BlockPool` knows the free blocks and the owners of the others, and `BlockPools` has one pool for each
cache group. Prefix tags stand for the tokens before a position, and the prefix cache finds blocks by them.
Limits bound blocks, rows and tokens of a step. Open the module of `BlockPool` first.
"""
