"""Start coding agents against a running cluster: ``convoy launch``.

`settings` says which variables, arguments and files each agent needs, one row for each agent. `launch` starts
the agent with them and removes its files afterwards. Open `settings` first.
"""
