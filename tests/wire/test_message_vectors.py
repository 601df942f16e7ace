"""The bytes and the tags of every message, which no renamed class and no moved module may change."""

from __future__ import annotations

import ast
import inspect
import json
from typing import get_args

import msgspec
import pytest

from convoy.wire.codec import decode_message, encode_message
from convoy.wire.fleet import messages as fleet
from convoy.wire.fleet.messages import FleetMessage, FromCoordinator, FromProvider, encode_fleet
from convoy.wire.messages.types import MESSAGE_TYPES
from support.sample_values import sample
from vectors.generate_messages import FILE, make, tag_of

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
FLEET_TAGS = {
    "from_provider": [
        *("Hello", "Register", "Proof", "Heartbeat", "Draining", "Began", "Chunk", "Done", "Failed"),
    ],
    "from_coordinator": [
        *("Challenge", "Registered", "AwaitApproval", "Refused", "Prove", "Serve", "Cancel", "Credit"),
    ],
}


@pytest.mark.parametrize("part", ["links", "from_provider", "from_coordinator", "signed"])
def test_every_message_has_the_bytes_of_its_vector(part: str) -> None:
    assert make()[part] == VECTORS[part]


def test_fleet_tags_are_these_words_and_no_others() -> None:
    assert [tag_of(kind) for kind in get_args(FromProvider)] == FLEET_TAGS["from_provider"]
    assert [tag_of(kind) for kind in get_args(FromCoordinator)] == FLEET_TAGS["from_coordinator"]


def test_every_fleet_message_writes_its_tag_out() -> None:
    tree = ast.parse(inspect.getsource(fleet))
    kinds = FleetMessage.__subclasses__()
    # A message of a module beside it may be imported already, by another test.
    names = {kind.__name__ for kind in kinds if kind.__module__ == fleet.__name__}
    assert names == {kind.__name__ for kind in (*get_args(FromProvider), *get_args(FromCoordinator))}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in names:
            written = {key.arg: key.value for key in node.keywords}
            assert isinstance(written.get("tag"), ast.Constant), f"{node.name} has no tag of its own"


def test_a_vector_decodes_to_the_message_that_it_was_made_of() -> None:
    for kind, message in MESSAGE_TYPES.items():
        data = bytes.fromhex(VECTORS["links"][f"0x{int(kind):02x}"]["all"])
        assert msgspec.msgpack.decode(data, type=message) == sample(message)
        # STEPs within a RANK_STEP have no draws, which a sample of all fields has
        if kind.name != "RANK_STEP":
            assert encode_message(decode_message(kind, data)) == data


def test_a_fleet_message_is_an_array_that_begins_with_its_tag() -> None:
    for part, tags in FLEET_TAGS.items():
        for tag in tags:
            assert msgspec.msgpack.decode(bytes.fromhex(VECTORS[part][tag]["all"]))[0] == tag
    credit = next(kind for kind in get_args(FromCoordinator) if tag_of(kind) == "Credit")
    assert encode_fleet(sample(credit)).hex() == VECTORS["from_coordinator"]["Credit"]["all"]
