"""What a peer tells of its life, for people and for whoever starts one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """Something a person who watches wants to know: ``kind`` is listening, head, loading, ready, active, lost
    or refused.
    """

    kind: str
    text: str
