"""The engine: one loop, `schedule -> submit -> collect -> commit`, over an executor.

`kv` accounts for K/V blocks, `requests` holds the state and the checks of a request, `run` executes steps
over one or several members, `ranks` shares a stage among several devices or members, and `sessions` saves and
restores conversations. `outputs` are the pieces that a client gets. `Engine` is the loop and `Scheduler`
decides each step, with integers alone. Open `engine.py` first, then `scheduler.py`.
"""
