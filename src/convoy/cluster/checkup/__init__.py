"""Examine this machine, this member's files and its network for `convoy doctor`.

Every examination yields a `Finding`: a line in plain words, with the command that mends the fault. One
module examines the machine alone, one what a Mac has beside, one the member's own files, and one the network
between members, up to a real link. Open the module of `Finding` first.
"""
