"""Sessions: a client's timeline of tokens and K/V, saved to a file and restored on other members."""
