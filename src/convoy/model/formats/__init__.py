"""Checkpoints whose weights are quantised: what they store, and how it is unpacked."""
