"""Make and verify evidence of members and providers, by a policy, with a verdict."""
