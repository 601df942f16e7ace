"""Measure a transfer between two processes of one machine: sealed twice, sealed once, or plain."""
