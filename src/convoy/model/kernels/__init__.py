"""Linears in exact float32, packed weights and their pages; `native` holds compiled code."""
