"""Describe the APIs that a fleet carries: one row each, in `table`.

`api` defines a row. The other modules hold what the rows are made of: for each API, the fields that reach an
engine, the reading of its events, and the events that a coordinator or a proxy adds. Open `table` first.
"""
