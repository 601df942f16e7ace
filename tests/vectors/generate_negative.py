"""Write negative_v1.json: `PYTHONPATH=src:tests python tests/vectors/generate_negative.py`.

Each case is a change of a message or frame of handshake_v1.json, and the class of error that an end must
raise for it. Provenance: the changes are written down here by hand from docs/protocol.md; the classes were
chosen from that page and `convoy.errors`, not recorded from a run. `tests/crypto/test_negative_vectors.py`
applies them to our code; another implementation can apply them to its own.

``edits``: [offset, hex] in place of what stands there; ``cut``: the message ends there; ``add``: hex after
its end.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from adversary.units import FRAME_FIELDS, message_1_fields, message_2_fields, message_3_fields

OUT = Path(__file__).parent / "negative_v1.json"
Case = dict[str, Any]
MESSAGE_1 = message_1_fields("alpha", "beta", "vectors")
MESSAGE_2 = message_2_fields()
MESSAGE_3 = message_3_fields()
HANDSHAKE, INCOMPATIBLE, SEAL = "HandshakeError", "Incompatible", "SealError"


def case(message: str, what: str, error: str, **change: Any) -> Case:
    return {"message": message, "what": what, **change, "error": error}


def message_1_cases() -> list[Case]:
    at = {name: start for name, (start, _) in MESSAGE_1.items()}
    end = max(end for _, end in MESSAGE_1.values())
    return [
        case("message_1", "another version", INCOMPATIBLE, edits=[[at["version"], "0002"]]),
        case("message_1", "version 0", INCOMPATIBLE, edits=[[at["version"], "0000"]]),
        case("message_1", "another link", HANDSHAKE, edits=[[at["link id"], "00" * 16]]),
        case("message_1", "another initiator", HANDSHAKE, edits=[[at["initiator"] + 1, "78"]]),
        case("message_1", "a longer name than the message", HANDSHAKE, edits=[[at["initiator"], "ff"]]),
        case("message_1", "another responder", HANDSHAKE, edits=[[at["responder"] + 1, "78"]]),
        case("message_1", "another cluster", HANDSHAKE, edits=[[at["cluster"] + 1, "78"]]),
        case(
            "message_1", "another roster of the epoch", INCOMPATIBLE, edits=[[at["roster digest"], "00" * 32]]
        ),
        case("message_1", "a share of small order", HANDSHAKE, edits=[[at["x25519 share"], "00" * 32]]),
        case("message_1", "a malformed KEM key", HANDSHAKE, edits=[[at["kem key"], "ff" * 1184]]),
        case("message_1", "no ciphers", HANDSHAKE, edits=[[at["ciphers"], "00"]], cut=at["ciphers"] + 1),
        case("message_1", "unknown ciphers alone", HANDSHAKE, edits=[[at["ciphers"] + 1, "6364"]]),
        case("message_1", "more ciphers than bytes", HANDSHAKE, edits=[[at["ciphers"], "09"]]),
        case("message_1", "a byte too many", HANDSHAKE, add="00"),
        case("message_1", "empty", HANDSHAKE, cut=0),
        *[
            case("message_1", f"ends before its {name}", HANDSHAKE, cut=start)
            for name, start in at.items()
            if start
        ],
        case("message_1", "ends one byte early", HANDSHAKE, cut=end - 1),
    ]


def message_2_cases() -> list[Case]:
    at = {name: start for name, (start, _) in MESSAGE_2.items()}
    end = max(end for _, end in MESSAGE_2.values())
    return [
        case("message_2", "another version", INCOMPATIBLE, edits=[[at["version"], "0002"]]),
        case("message_2", "a cipher that was not offered", HANDSHAKE, edits=[[at["cipher"], "63"]]),
        case("message_2", "another cipher of the offer", HANDSHAKE, edits=[[at["cipher"], "02"]]),
        case(
            "message_2", "another roster of the epoch", INCOMPATIBLE, edits=[[at["roster digest"], "00" * 32]]
        ),
        case("message_2", "another epoch", HANDSHAKE, edits=[[at["roster epoch"], "0000000000000009"]]),
        case("message_2", "a share of small order", HANDSHAKE, edits=[[at["x25519 share"], "00" * 32]]),
        case("message_2", "another share", HANDSHAKE, edits=[[at["x25519 share"], "09"]]),
        case(
            "message_2", "another KEM ciphertext", HANDSHAKE, edits=[[at["kem ciphertext"] + 500, "00" * 8]]
        ),
        case("message_2", "another signature", HANDSHAKE, edits=[[at["signature"], "00" * 64]]),
        case("message_2", "another MAC", HANDSHAKE, edits=[[at["mac"], "00" * 32]]),
        case("message_2", "a byte too many", HANDSHAKE, add="00"),
        case("message_2", "empty", HANDSHAKE, cut=0),
        case("message_2", "ends one byte early", HANDSHAKE, cut=end - 1),
    ]


def message_3_cases() -> list[Case]:
    at = {name: start for name, (start, _) in MESSAGE_3.items()}
    return [
        case("message_3", "another signature", HANDSHAKE, edits=[[at["signature"], "00" * 64]]),
        case("message_3", "another MAC", HANDSHAKE, edits=[[at["mac"], "00" * 32]]),
        case("message_3", "a byte too many", HANDSHAKE, add="00"),
        case("message_3", "a byte too few", HANDSHAKE, cut=95),
        case("message_3", "empty", HANDSHAKE, cut=0),
    ]


def frame_cases() -> list[Case]:
    """Return cases of the first sealed frame to the responder; the vectors' headers are any 48 bytes."""
    fields = [
        case("frame", f"another {name}", SEAL, header_edits=[[start // 8, "ff"]])
        for name, (start, _) in FRAME_FIELDS.items()
    ]
    return [
        *fields,
        case("frame", "the sequence of the next frame", SEAL, sequence=1),
        case("frame", "a changed first byte", SEAL, flip=0),
        case("frame", "a changed tag", SEAL, flip=-1),
        case("frame", "cut short", SEAL, cut=16),
        case("frame", "opened twice", SEAL, twice=True),
        case("frame", "opened in the other direction", SEAL, direction="to_initiator"),
    ]


def main() -> None:
    cases = [*message_1_cases(), *message_2_cases(), *message_3_cases(), *frame_cases()]
    vector = {
        "provenance": "tests/vectors/generate_negative.py: changes and classes by hand from docs/protocol.md",
        "applies_to": "handshake_v1.json",
        "cases": cases,
    }
    OUT.write_text(json.dumps(vector, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
