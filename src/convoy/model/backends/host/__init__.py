"""A stage on this host: exact float32 or rounded weights, with compiled code where it is verified."""
