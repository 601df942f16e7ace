"""Measure what `convoy bench` reports. Each module measures one thing and returns numbers; `cli.benches`
prints.

`report` holds the form of a result, `hop` a transfer between two processes, `ranks` all-reduces, `cuda` one
or two CUDA devices, and `fleet` a coordinator with simulated providers.
"""
