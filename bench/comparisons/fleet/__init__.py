"""Measure a coordinator with many providers.

`simulation` runs thousands of simulated providers under the coordinator's own dispatcher, on a simulated
clock. The others belong to `convoy bench providers`, with real sockets: `scenario` reads the scenarios,
`provider` simulates one provider, `load` sends the requests, `verdict` judges the answers, and `page`
writes the report. Open `scenario` first.
"""
