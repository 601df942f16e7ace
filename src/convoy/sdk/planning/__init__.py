"""Plan a model over members that need not run: the core of `convoy plan` and of `convoy.plan`.

`members` reads rosters, named members and devices, and `speeds` completes them with measurements and
assumptions. `planning` makes the plan, `fit` does so for many popular
models, and `kept` for those of this machine's cache. Open `planning` first.
"""
