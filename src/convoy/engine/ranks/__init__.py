"""A stage that several ranks hold: the leader orders steps, the followers run them."""
