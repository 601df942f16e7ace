"""Start servers and members for the verbs that run until they are told to stop.

One module loads this member with its notes, one opens the model that the command line names, and one
shortens the start and end of a process. Others run a coordinator, a provider beside a head,
and an invitation in a child process. `process` keeps the record that other
commands find a running server by. `endpoint` has the flags of a client. Open `member` first.
"""
