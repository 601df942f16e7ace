"""Name, pin and serve the members that `convoy run`, the demo, benches and tests start on this machine.

`ServedCluster` serves the processes of a `LocalCluster`, and can kill, stop or cut off its members. The
other modules read the members' names and layers from flags, and pin members to cores. Open the module of
`ServedCluster` first.
"""
