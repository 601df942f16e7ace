"""Parts of a model on this disk: received, digested and verified."""
