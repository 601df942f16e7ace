"""Convoy: one language model across several machines, over links that are always sealed."""

__version__ = "0.1.0"
