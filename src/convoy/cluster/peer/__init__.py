"""A peer: receive a plan, load its stage, take its place in the ring, and run steps."""
