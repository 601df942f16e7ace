"""Hold the form of a result: machine, clock, percentiles, tables and plots."""
