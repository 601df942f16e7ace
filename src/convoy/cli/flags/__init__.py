"""Groups of options that several verbs share, and their conversion to the values of other packages.

There is one module for each group: the device, rounded weights, limits of steps and ways to share a model,
the HTTP server, local discovery, metrics, and traces. Open the group of limits of steps first: most verbs
of a cluster take it.
"""
