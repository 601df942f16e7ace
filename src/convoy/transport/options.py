"""Limits and deadlines of links, one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.crypto.cipher import Cipher
from convoy.crypto.seal import KeyLimits


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """``ciphers`` None: what this machine's CPU says.

    ``stall_timeout_s``: a peer that takes nothing for so long is gone.
    """

    handshake_timeout_s: float = 5.0
    stall_timeout_s: float = 60.0
    close_timeout_s: float = 1.0
    max_queued_frames: int = 64
    max_queued_bytes: int = 64 * 1024 * 1024
    max_tensor_bytes: int = 256 * 1024 * 1024
    max_half_open: int = 64
    ciphers: tuple[Cipher, ...] | None = None
    key_limits: KeyLimits = field(default_factory=KeyLimits)
