"""Collectives of ranks: sums over sealed links, gloo or nccl, in rank order."""
