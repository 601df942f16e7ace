"""The verbs below `convoy bench`: their flags, and how their results are printed.

Each module is one verb or two that belong together. `run` holds the parts that all of them share: flags,
the measured cluster, and the forms of a report. The measurements themselves are in `convoy.bench`. Open
`run` first.
"""
