"""Bytes on the wire: frame headers, tensors, and messages by frame type. No sockets.

`messages` holds the messages between members, `fleet` those between providers, coordinators and proxies.
"""
