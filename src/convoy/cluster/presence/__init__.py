"""Know the members that are connected to the head: dialled, greeted, slow, idle or missing.

`Peers` links, greets and admits them. `FirstDial` reaches the whole roster at once, and `Backoff` spaces
later tries. `SlowMembers` and idle times record members that hold others up or hold no layers. A mailbox
keeps messages that come before a plan is active. Open the module of `Peers` first.
"""
