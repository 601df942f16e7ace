"""Distribute weights: heads and peers serve tensors to each other, and verify them."""
