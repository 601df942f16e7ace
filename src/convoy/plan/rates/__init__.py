"""Predict the rates of a placement, and compare the ways to share a model.

`rates` predicts tokens per second, and their limit, from speeds, memory rates and round trips. `compare`
does so for every way to share a model and states the gain of tensor parallelism. Open `rates` first.
"""
