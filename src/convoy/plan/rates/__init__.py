"""Predict the rates of a placement, and compare the ways to share a model."""
