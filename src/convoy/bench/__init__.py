"""Measure the values that `convoy bench` reports. Each module measures one thing and returns numbers.

`report` holds the form of a result. `hop` measures a transfer between two processes, `ranks` all-reduces, and
`forms` a model in each form of files.
The modules beside them measure a served cluster: its throughput, drafts, losses and devices. Comparisons for
developers stand in `bench/` beside `src/`. `cli.benches` prints.
Open `throughput` first.
"""
