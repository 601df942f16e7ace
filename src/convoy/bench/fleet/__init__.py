"""A coordinator's dispatcher over thousands of simulated providers, scenario by scenario."""
