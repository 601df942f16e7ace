"""Bytes on the wire: frame headers, tensors, and messages by frame type. No sockets.

`messages` holds the messages between members, `fleet` those between providers, coordinators and proxies, and
`front` those between the two processes of a head.
`frame` has the header and the limit of each type, `codec` encodes and decodes messages, `tensor` describes
a tensor, and `text` makes a peer's text harmless. Open `frame` first, then `messages`.
"""
