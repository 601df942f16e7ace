"""A request on its way: lease, attempts, blind mode, and what is charged."""
