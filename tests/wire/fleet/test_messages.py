"""The tags of the fleet's messages, which are bytes on the wire and no class names."""

from __future__ import annotations

import ast
import inspect
import json
from typing import get_args

import msgspec

from convoy.wire.fleet import messages as fleet
from convoy.wire.fleet.messages import FleetMessage, FromCoordinator, FromProvider, encode_fleet
from support.sample_values import sample
from vectors.generate_messages import FILE, tag_of

VECTORS = json.loads(FILE.read_text(encoding="utf-8"))
FLEET_TAGS = {
    "from_provider": [
        *("Hello", "Register", "Proof", "Heartbeat", "Draining", "Began", "Chunk", "Done", "Failed"),
    ],
    "from_coordinator": [
        *("Challenge", "Registered", "AwaitApproval", "Refused", "Prove", "Serve", "Cancel", "Credit"),
    ],
}


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


def test_a_fleet_message_is_an_array_that_begins_with_its_tag() -> None:
    for part, tags in FLEET_TAGS.items():
        for tag in tags:
            assert msgspec.msgpack.decode(bytes.fromhex(VECTORS[part][tag]["all"]))[0] == tag
    credit = next(kind for kind in get_args(FromCoordinator) if tag_of(kind) == "Credit")
    assert encode_fleet(sample(credit)).hex() == VECTORS["from_coordinator"]["Credit"]["all"]
