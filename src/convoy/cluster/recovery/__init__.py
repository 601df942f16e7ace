"""Recover from a lost stage: find the fault, plan again, and use members that come back."""
