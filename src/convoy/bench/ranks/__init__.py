"""Measure all-reduces between two ranks, and compare tensor parallelism with a pipeline."""
