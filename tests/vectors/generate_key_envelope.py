"""Write key_envelope_v1.json: `python tests/vectors/generate_key_envelope.py` from the repository's root.

Every value comes from a fixed seed, so a second run writes the same file. `tests/crypto/test_key_envelope.py`
recomputes it twice, with our code and with a second computation written from docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from convoy.crypto.key_envelope import seal_key

OUT = Path(__file__).parent / "key_envelope_v1.json"
PASSPHRASES = ["correct horse battery staple", "Zu\u0308rich \u96e8"]


def seed(name: str, size: int) -> bytes:
    """Make fixed bytes for a name."""
    return hashlib.shake_256(b"convoy key envelope vectors v1 " + name.encode()).digest(size)


def main() -> None:
    private_key, salt, nonce = seed("key", 32), seed("salt", 16), seed("nonce", 12)
    vector = {
        "provenance": "tests/vectors/generate_key_envelope.py; from seeds",
        "private_key": private_key.hex(),
        "salt": salt.hex(),
        "nonce": nonce.hex(),
        "envelopes": [
            {
                "passphrase": text,
                "envelope": seal_key(private_key, text, salt=salt, nonce=nonce).hex(),
            }
            for text in PASSPHRASES
        ],
    }
    OUT.write_text(json.dumps(vector, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
