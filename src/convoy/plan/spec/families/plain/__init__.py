"""Families that are an embedding, layers and a norm: a row is all that they need.

Their weights are counted from the headers of the checkpoint.
"""
