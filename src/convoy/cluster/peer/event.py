"""The events of a peer's life, for people and for the code that starts a peer.

It is apart because the command line imports it without the rest of a peer.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Hold one event that is worth showing to a person.

    ``kind`` is listening, head, loading, ready, active, ended, lost, refused or unloaded. A link has ended
    if its other end said goodbye; otherwise it is lost.
    """

    kind: str
    text: str
