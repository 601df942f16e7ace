"""Sealed requests and answers of blind mode (HPKE), with padding, and files sealed in chunks."""
