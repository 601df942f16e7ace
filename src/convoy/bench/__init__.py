"""Measure the values that `convoy bench` reports. Each module measures one thing and returns numbers.

`report` holds the form of a result. `hop` measures a transfer between two processes, `ranks` all-reduces,
`cuda` one or two CUDA devices, and `fleet` a coordinator with simulated providers. The modules beside them
measure a served cluster: its throughput, fairness, drafts, losses and idle load. `cli.benches` prints.
Open `throughput` first.
"""
