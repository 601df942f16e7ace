"""Sign and check the list of members: text, checks, acceptance, and the change of operators."""
