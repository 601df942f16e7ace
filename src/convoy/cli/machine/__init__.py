"""The verbs that look after the processes of this machine.

`service` installs a member as a service of the system. `managers` asks systemd or launchd, and `units` writes
their files. Open `service` first.
"""
