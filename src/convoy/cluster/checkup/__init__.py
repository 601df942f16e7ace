"""Examine this machine, this member's files and its network, and return findings with their remedies."""
