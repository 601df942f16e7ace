"""Metric families of members and engines, and the small HTTP listener that serves them."""
