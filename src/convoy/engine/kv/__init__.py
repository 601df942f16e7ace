"""Block pools, prefix tags and the prefix cache: integer accounting, no tensors."""
