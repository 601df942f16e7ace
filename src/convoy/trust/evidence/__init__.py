"""Evidence of members and providers, the policy that verifies it, and the verdict."""
