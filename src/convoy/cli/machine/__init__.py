"""The verbs that look after the processes of this machine.

`service` installs a member as a service of the system. `managers` asks systemd or launchd, and `units` writes
their files. `processes` lists and stops processes, and shows the logs of services. `versions` compares those
of a cluster's members. `report` writes a file for a bug report, without what `redaction` takes out.
`overview` is `convoy` without arguments. Open `service` first.
"""
