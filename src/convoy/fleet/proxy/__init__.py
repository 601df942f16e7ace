"""The local proxy: seals a user's requests to providers that the user trusts."""
