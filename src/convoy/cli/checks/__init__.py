"""The parts of `doctor`, `plan` and `verify` that measure or examine."""
