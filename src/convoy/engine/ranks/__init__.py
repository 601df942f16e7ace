"""A stage that several ranks hold: the leader orders steps, and the followers run them."""
