"""Seal a user's requests, on the user's machine, to providers that the user trusts: the local proxy."""
