"""Collectives of ranks: sums and gathers, always in rank order, so that timing changes no result.

`SealedCollective` sums over sealed links between members, in a ring whose routes are numbers.
`LocalCollective` sums by gloo or nccl between processes or devices of one host. An agreement comes before
the first operation, and a mailbox keeps the parts of others. Open the module of `SealedCollective` first.
"""
