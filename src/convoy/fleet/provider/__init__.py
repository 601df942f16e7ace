"""A provider: dials its coordinator, proves itself, and answers with the engine behind it."""
