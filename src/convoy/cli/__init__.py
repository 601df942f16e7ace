"""The command `convoy`: one module per verb. Only this package prints.

`flags` holds shared options, `show` output, `operator` keys and rosters, `running` servers and members,
`local` clusters of processes on this machine, `machine` services, `checks` measurements, `benches` the bench
verbs, `agents` the settings of coding agents, and `model_files` the verbs on checkpoints. Open `verbs` first:
it has one row a verb, and a verb's module is imported only when the verb is used. Then open the module that
has the verb's name.
"""
