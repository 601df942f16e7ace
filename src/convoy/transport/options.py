"""The limits and deadlines of links, in one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field

from convoy.crypto.cipher import Cipher
from convoy.crypto.seal import SealLimits
from convoy.transport.admission import AdmissionLimits
from convoy.transport.byte_budget import ByteBudget


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """Set the limits and deadlines of links. Without ``ciphers`` the machine's CPU decides.

    ``stall_timeout_s``: a peer that takes nothing for this long is gone. ``ping_after_s``: an end that
    has sent nothing for this long sends a PING. ``gone_after_s``: a peer that has sent no frame for this
    long is gone.

    ``floor_bytes_per_s``: the rate that sets how much more time a long message or tensor gets.
    ``memory_budget``: memory for incomplete tensors and long messages, shared by all links that are made
    with this value.

    ``replace_after_records`` and ``max_tls_records`` count the TLS records of one connection. At the
    first the dialler replaces both connections, trying again every ``replace_retry_s``. At the second the
    link ends.
    """

    handshake_timeout_s: float = 5.0
    stall_timeout_s: float = 60.0
    close_timeout_s: float = 1.0
    max_queued_frames: int = 64
    max_queued_bytes: int = 64 * 1024 * 1024
    max_tensor_bytes: int = 256 * 1024 * 1024
    max_half_open: int = 64
    max_links_per_member: int = 4
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    ping_after_s: float = 10.0
    gone_after_s: float = 30.0
    floor_bytes_per_s: float = 256.0 * 1024
    memory_budget: ByteBudget = field(default_factory=ByteBudget, compare=False)
    ciphers: tuple[Cipher, ...] | None = None
    replace_after_records: int = 2**23
    max_tls_records: int = 2**24
    replace_retry_s: float = 1.0
    key_limits: SealLimits = field(default_factory=SealLimits)
