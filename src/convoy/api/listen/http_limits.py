"""Bound the resources that a client may hold before the listener knows its key."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from convoy.transport.listen.descriptors import descriptor_limit
from convoy.transport.listen.places import Clock, SlotLimits


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Hold the limits of one HTTP listener.

    A connection is *kept* while it has an admitted request: its body is read, or its answer is under way.
    Every other connection is *unproven*: it waits for a request, or works on one like a health check.
    Unproven connections give way to newer ones (`transport.listen.places`). Kept connections do not.

    ``max_header_bytes`` also bounds the bytes between two parts of a body (chunk extensions, trailers).
    ``header_timeout_s`` runs from the accept, or from a later request's first byte, to the header's last
    byte; it includes a TLS handshake. ``max_discarded_bytes`` bounds the rest of a body after its request was
    answered. ``max_unproven`` bounds the waiting connections, and as many again may work. It and ``max_kept``
    are upper bounds: `fit` lowers them to the process's descriptors, of which ``spare_descriptors`` stay free
    for links, files and the database.
    """

    max_header_bytes: int = 32 * 1024
    max_header_fields: int = 100
    header_timeout_s: float = 10.0
    max_discarded_bytes: int = 1024 * 1024
    max_unproven: int = 512
    max_unproven_per_address: int = 256
    max_kept: int = 65_536
    spare_descriptors: int = 384
    clock: Clock = field(default=time.monotonic, compare=False, repr=False)

    def fit(self, num_descriptors: int | None = None) -> SlotLimits:
        """Return the connections that a process with ``num_descriptors`` may hold; None: this process."""
        most = descriptor_limit() if num_descriptors is None else num_descriptors
        room = max(3, most - min(self.spare_descriptors, most // 2))
        unproven = min(self.max_unproven, room // 3)
        kept = min(self.max_kept, room - 2 * unproven)
        return SlotLimits(unproven, unproven, kept, min(self.max_unproven_per_address, unproven))
