"""Run clusters and fleets of real processes on this machine, for `run`, the demo, benches and tests.

`LocalCluster` starts a process for each member, with identities and a roster of its own. `ServedCluster`
serves it and can kill, stop or cut off its members. `LocalFleet` adds a coordinator and providers. The
other modules name members and pin them to cores. Open the module of `LocalCluster` first.
"""
