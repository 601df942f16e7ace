"""Evidence between head and peers: make it, ask for it, and verify it against the head's policy."""
