"""The commands of bench/compare.py: one module each."""
