"""The command `convoy`: one module per verb. Only this package prints.

`flags` holds shared options, `show` output, `operator` keys and rosters, `running` servers and members,
`local` clusters of processes on this machine, `checks` measurements, and `benches` the bench verbs.
"""
