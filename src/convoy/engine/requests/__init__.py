"""A request: its parameters, the checks before it is admitted, and the choices that it generates."""
