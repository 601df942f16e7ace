"""Start servers and members for the verbs that run until they are told to stop.

One module converts convoy.toml to the options of other packages, one opens the model that the command line
names, and one shortens the start and end of a process. Others run a coordinator, a provider beside a head,
and an invitation in a child process. `Endpoint` calls the API of a running head. Open the module about a
member's options first.
"""
