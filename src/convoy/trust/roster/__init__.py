"""The signed list of members: text, checks, acceptance, and the change of operators."""
