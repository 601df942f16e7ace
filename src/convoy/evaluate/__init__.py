"""Check a split model against the unsplit one: parity certificates, question sets and the leak search."""
