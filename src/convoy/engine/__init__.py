"""The engine: one loop, `schedule -> submit -> collect -> commit`, over an executor.

`kv` accounts for K/V blocks, `requests` holds the state and the checks of a request, `run` executes steps
over one or several members, `ranks` shares a stage among several devices or members, and `sessions` saves
and restores conversations.
"""
