"""Self-checks at start: prove on this machine that a row's bits do not depend on its batch."""
