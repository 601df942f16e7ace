"""Write handshake_v1.json: `python tests/vectors/generate_handshake.py` from the root of the repository.

Every key comes from a fixed seed, except that ML-KEM encapsulation draws its own randomness: so the
ciphertext of M2, and all that follows from it, is new in each run, and the file is the record of one run.
`tests/crypto/test_vectors.py` recomputes it twice, with our code and with an independent key schedule written
from docs/protocol.md.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from convoy.crypto.cipher import TAG_BYTES, Cipher
from convoy.crypto.handshake import Ephemeral, HandshakeContext, Initiator, Party, Responder
from convoy.crypto.seal import Sealer, SealLimits

OUT = Path(__file__).parent / "handshake_v1.json"
BOTH = (Cipher.AES_256_GCM, Cipher.CHACHA20_POLY1305)


def seed(name: str, size: int = 32) -> bytes:
    """Make fixed bytes for a name."""
    return hashlib.shake_256(b"convoy vectors v1 " + name.encode()).digest(size)


def context() -> HandshakeContext:
    """Return the two members of the vectors."""
    keys = [Ed25519PrivateKey.from_private_bytes(seed(name)) for name in ("alpha", "beta")]
    parties = [
        Party(name, key.public_key().public_bytes_raw(), seed(f"{name} certificate"))
        for name, key in zip(("alpha", "beta"), keys, strict=True)
    ]
    return HandshakeContext(
        parties[0], parties[1], seed("link", 16), "vectors", 5, seed("roster"), replaces=seed("old link", 16)
    )


def main() -> None:
    about = context()
    signers = [Ed25519PrivateKey.from_private_bytes(seed(name)).sign for name in ("alpha", "beta")]
    ephemeral = Ephemeral(
        X25519PrivateKey.from_private_bytes(seed("initiator x25519")),
        MLKEM768PrivateKey.from_seed_bytes(seed("initiator mlkem", 64)),
    )
    share = X25519PrivateKey.from_private_bytes(seed("responder x25519"))
    initiator = Initiator(about, signers[0], BOTH, ephemeral)
    responder = Responder(about, signers[1], BOTH, share)
    message_1 = initiator.create_1()
    responder.consume_1(message_1)
    message_2 = responder.create_2()
    initiator.consume_2(message_2)
    message_3, secrets = initiator.create_3()
    assert responder.consume_3(message_3).receive == secrets.send
    frames = []
    sealer = Sealer(secrets.send, secrets.cipher, SealLimits(max_records=2))
    for number in range(4):
        header = f"header {number}".encode().ljust(48, b".")
        text = f"frame {number} under the ratchet".encode()
        sealed = bytearray(len(text) + TAG_BYTES)
        sealer.seal_into(header, text, memoryview(sealed))
        frames.append({"header": header.hex(), "text": text.hex(), "sealed": sealed.hex()})
    vector = {
        "provenance": "tests/vectors/generate_handshake.py; secrets from seeds, the ML-KEM ciphertext random",
        "x25519_shared": ephemeral.x25519.exchange(share.public_key()).hex(),
        "mlkem_shared": ephemeral.mlkem.decapsulate(message_2[75 : 75 + 1088]).hex(),
        "message_1": message_1.hex(),
        "message_2": message_2.hex(),
        "message_3": message_3.hex(),
        "transcript": secrets.transcript.hex(),
        "binding": secrets.binding.hex(),
        "to_responder": secrets.send.hex(),
        "to_initiator": secrets.receive.hex(),
        "ratchet_after_records": 2,
        "frames_to_responder": frames,
    }
    OUT.write_text(json.dumps(vector, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
