"""API keys: read their files, check a caller's key, and apply each key's limits."""
