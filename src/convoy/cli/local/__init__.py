"""Clusters and fleets of real processes on this machine, for `run`, the demo, benches and tests."""
