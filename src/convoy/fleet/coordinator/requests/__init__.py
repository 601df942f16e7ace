"""Follow a request on its way: lease, attempts, blind mode, and the charge."""
