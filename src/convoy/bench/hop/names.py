"""Name the two processes of the hop bench and their files."""

HOME = "home"
ECHO = "echo"
# Loopback only, because one of the three ways between the processes is not sealed.
HOST = "127.0.0.1"
ROSTER = "roster.toml"
