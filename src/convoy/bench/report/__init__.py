"""Hold the form of a result, so that all benches report alike.

`machine` describes the machine and how busy it was, and `clock` tracks the time of a run. `percentile`
computes percentiles, `plot` draws lines as SVG, and `report` writes JSON and tables. Open `report` first.
"""
