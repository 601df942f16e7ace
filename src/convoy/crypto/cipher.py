"""The two AEAD ciphers of a link, and which of them this CPU runs in hardware."""

from __future__ import annotations

import enum
import functools
import platform
from pathlib import Path

from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from convoy.errors import HandshakeError

TAG_BYTES = 16
KEY_BYTES = 32
NONCE_BYTES = 12

Aead = AESGCM | ChaCha20Poly1305


class Cipher(enum.IntEnum):
    """Number the ciphers as M1 and M2 do."""

    AES_256_GCM = 1
    CHACHA20_POLY1305 = 2

    @property
    def title(self) -> str:
        return "AES-256-GCM" if self is Cipher.AES_256_GCM else "ChaCha20-Poly1305"

    def make(self, key: bytes | bytearray) -> Aead:
        """Return the cipher under a 32-byte key. It keeps a copy of its own."""
        return AESGCM(key) if self is Cipher.AES_256_GCM else ChaCha20Poly1305(key)


def choose_cipher(offered: tuple[Cipher, ...], own: tuple[Cipher, ...]) -> Cipher:
    """Choose AES-256-GCM if both ends have it in hardware, otherwise ChaCha20-Poly1305.

    Raises `HandshakeError` if the two ends share no cipher.
    """
    for cipher in Cipher:
        if cipher in offered and cipher in own:
            return cipher
    raise HandshakeError("the two members have no cipher in common")


@functools.cache
def local_ciphers() -> tuple[Cipher, ...]:
    """Return the ciphers that this machine offers.

    AES is among them only if the CPU has instructions for it: without them it is slow and leaks timing.
    """
    both = (Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)
    return both if _has_aes() else (Cipher.CHACHA20_POLY1305,)


def _has_aes() -> bool:
    if platform.system() == "Darwin":
        # Every Mac since 2010 has AES instructions, Intel or Apple.
        return True
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    # Linux lists the instructions under "flags" on x86, and under "Features" on Arm.
    lines = (line.lower() for line in text.splitlines())
    return any("aes" in line.split() for line in lines if line.startswith(("flags", "features")))
