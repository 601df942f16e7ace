"""Measure a coordinator's dispatcher with thousands of simulated providers, scenario by scenario."""
