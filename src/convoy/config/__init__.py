"""`convoy.toml`: read the file strictly into frozen values."""
