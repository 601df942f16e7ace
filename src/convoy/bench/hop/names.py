"""What the two processes of the hop bench call themselves and each other."""

HOME = "home"
ECHO = "echo"
HOST = "127.0.0.1"  # and nowhere else: one of the three ways between them is not sealed
ROSTER = "roster.toml"
