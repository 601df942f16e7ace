"""Write messages_v1.json: the bytes of a message of every kind, with all fields and with the required ones.

`support.sample_values` makes the messages from their field types. The file's keys are names on the wire: the
type number of a frame, or a tag. Class names may change; these bytes may not.
Provenance: `python tests/vectors/generate_messages.py`, with src and tests on PYTHONPATH.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec

from convoy.wire.fleet.certified import ProviderCertificate
from convoy.wire.fleet.messages import FromCoordinator, FromProvider
from convoy.wire.fleet.provider_evidence import ProviderEvidence
from convoy.wire.messages.types import MESSAGE_TYPES
from support.sample_values import sample

FILE = Path(__file__).with_name("messages_v1.json")


def make() -> dict[str, Any]:
    """Return the whole vector file: hex by frame type for links, hex by tag for the fleet."""
    return {
        "provenance": "tests/vectors/generate_messages.py",
        "links": {f"0x{int(kind):02x}": encoded(message) for kind, message in MESSAGE_TYPES.items()},
        "from_provider": {tag_of(kind): encoded(kind) for kind in get_args(FromProvider)},
        "from_coordinator": {tag_of(kind): encoded(kind) for kind in get_args(FromCoordinator)},
        "signed": {tag_of(kind): encoded(kind) for kind in (ProviderCertificate, ProviderEvidence)},
    }


def tag_of(kind: type[Any]) -> str:
    """Return the tag that a message of ``kind`` begins with on the wire."""
    config: msgspec.structs.StructConfig = kind.__struct_config__
    return str(config.tag)


def encoded(kind: type[Any]) -> dict[str, str]:
    """Return the hex bytes of ``kind`` with every field, and with the required fields alone."""
    return {
        "all": msgspec.msgpack.encode(sample(kind)).hex(),
        "required": msgspec.msgpack.encode(sample(kind, optional=False)).hex(),
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(make(), indent=1) + "\n", encoding="utf-8")
