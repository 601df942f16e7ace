"""The bytes and the tags of every message, which no renamed class and no moved module may change."""

from __future__ import annotations

import json

import msgspec
import pytest

from convoy.wire.codec import decode_message, encode_message
from convoy.wire.messages.types import MESSAGE_TYPES
from support.sample_values import sample
from vectors.generate_messages import FILE, make

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("part", ["links", "from_provider", "from_coordinator", "signed"])
def test_every_message_has_the_bytes_of_its_vector(part: str) -> None:
    assert make()[part] == VECTORS[part]


def test_a_vector_decodes_to_the_message_that_it_was_made_of() -> None:
    for kind, message in MESSAGE_TYPES.items():
        data = bytes.fromhex(VECTORS["links"][f"0x{int(kind):02x}"]["all"])
        assert msgspec.msgpack.decode(data, type=message) == sample(message)
        # STEPs within a RANK_STEP have no samples, which a sample of all fields has
        if kind.name != "RANK_STEP":
            assert encode_message(decode_message(kind, data)) == data
